"""How fast each rank is, by passes in which it alone has more than one sample."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unipar.data import Loader
from unipar.errors import ConfigError
from unipar.loss import LossFn
from unipar.strategy import Engine
from unipar.world import World

_WARM_UPS = 2


@dataclass(frozen=True)
class Speeds:
    """How long a pass over some samples takes when one rank alone has more than one of them.

    Attributes:
        few: samples of the smaller size.
        many: samples of the larger one.
        over_few: seconds, by data-parallel rank.
        over_many: likewise.
    """

    few: int
    many: int
    over_few: tuple[float, ...]
    over_many: tuple[float, ...]

    @classmethod
    def least(cls, rounds: Sequence[Speeds]) -> Speeds:
        """The least times of several rounds: whatever else a host does only adds to them."""
        few, many = (
            tuple(map(min, zip(*times, strict=True)))
            for times in ([one.over_few for one in rounds], [one.over_many for one in rounds])
        )
        return cls(rounds[0].few, rounds[0].many, few, many)

    @property
    def lines(self) -> list[tuple[float, float]]:
        """The seconds of each rank's pass without its samples, and those that each sample adds."""
        found = []
        for few, many in zip(self.over_few, self.over_many, strict=True):
            # Noise must not make more samples cheaper, or a pass of none cost less than nothing.
            sample = min(max(many - few, 0.0) / (self.many - self.few), many / self.many)
            found.append((many - sample * self.many, sample))
        return found

    @property
    def factors(self) -> list[float]:
        """How many times as long as the fastest rank each takes for a sample.

        What a pass takes anyway is the exchange between ranks above all, the same for each.
        """
        anyway = min(fixed for fixed, _ in self.lines)
        samples = [max(seconds - anyway, 1e-9) for seconds in self.over_many]
        return [sample / min(samples) for sample in samples]

    def step(self, parts: Sequence[int]) -> float:
        """Seconds of the passes of a step in which ranks take these numbers of samples."""
        passes = math.ceil(max(parts) / self.many)
        # A pass for which a rank has no sample left is run on one that counts nothing.
        return max(
            passes * fixed + max(part, passes) * sample
            for part, (fixed, sample) in zip(parts, self.lines, strict=True)
        )

    def parts(self, num_samples: int) -> list[int]:
        """The division of a global batch by which its passes take least; each rank has a part."""
        passes = math.ceil(num_samples / len(self.over_many) / self.many)
        best = self._parts(num_samples, passes)
        while True:
            passes += 1
            found = self._parts(num_samples, passes)
            if self.step(found) >= self.step(best):
                return best
            best = found

    def _parts(self, num_samples: int, passes: int) -> list[int]:
        """The same by so many passes."""
        parts, lines = [1] * len(self.over_many), self.lines

        def with_one_more(rank: int) -> tuple[float, int]:
            fixed, sample = lines[rank]
            return passes * fixed + max(parts[rank] + 1, passes) * sample, rank

        # A further sample goes to the rank that would be busy with it for the shortest time.
        busy = [with_one_more(rank) for rank in range(len(parts))]
        heapq.heapify(busy)
        for _ in range(num_samples - len(parts)):
            _, rank = heapq.heappop(busy)
            parts[rank] += 1
            if parts[rank] < passes * self.many:
                heapq.heappush(busy, with_one_more(rank))
        return parts


def check_tells_apart(micro_batch_size: int) -> None:
    """Refuse micro-batches by which the speeds of ranks cannot be told apart.

    Args:
        micro_batch_size: samples of the largest pass of a rank.

    Raises:
        ConfigError: they are of one sample.
    """
    if micro_batch_size < 2:
        raise ConfigError(
            "shares='auto' with micro_batch_size=1: all ranks run equally many passes in a step, "
            "and a pass of one sample cannot be made smaller for a slow rank. Raise "
            "micro_batch_size, to 4 or more, or leave it out, with at least 2 samples of "
            "global_batch_size for each rank."
        )


class SpeedTest:
    """Times passes of each data-parallel rank while the others have one sample each.

    A rank's own time cannot be read off its steps: ranks that hold parts of a model exchange them
    within each pass, and all of them take as long as the slowest. The one that alone has more than
    one sample is the slowest, and the time of all is its own, under any strategy, with that of the
    exchange. All ranks compute the same samples.

    Args:
        engine: between two steps; nothing of a pass is left in it.
        loader: of the run; its place stays.
        loss_fn: as in training.
        world: the joined processes.

    Raises:
        ConfigError: ranks cannot be told apart by micro-batches of this size.
    """

    def __init__(self, engine: Engine, loader: Loader, loss_fn: LossFn, world: World) -> None:
        many = loader.micro_batch_size
        # Where it was to be found out, nothing before the ranks knew it.
        check_tells_apart(many)
        self._engine, self._loss_fn, self._world = engine, loss_fn, world
        self._few, self._many = many // 2, many
        # A dataset that draws random numbers must not move those of the run.
        with torch.random.fork_rng(devices=[]):
            # Kept, so that ranks compute the same when they are timed again.
            self._batches = {size: loader.first(size) for size in {1, self._few, self._many}}

    def warm_up(self) -> None:
        """Run each pass, all ranks the same one. Collective."""
        for _ in range(_WARM_UPS):
            for size in sorted(self._batches):
                self._time(size)

    def rounds(self, count: int) -> list[Speeds]:
        """Time each rank so many times. Collective.

        Returns:
            The same on every rank, as rank 0 has timed them.
        """
        return self._world.broadcast([self._round() for _ in range(count)])

    def _round(self) -> Speeds:
        few, many = zip(*map(self._of, range(self._world.data_size)), strict=True)
        return Speeds(self._few, self._many, few, many)

    def _of(self, rank: int) -> tuple[float, float]:
        own = self._world.data_rank == rank
        return self._time(self._few if own else 1), self._time(self._many if own else 1)

    def _time(self, size: int) -> float:
        self._world.barrier()
        began = time.perf_counter()
        self._engine.probe(self._batches[size], self._loss_fn)
        if self._world.device.type != "cpu":
            torch.get_device_module(self._world.device).synchronize()
        self._world.barrier()
        return time.perf_counter() - began
