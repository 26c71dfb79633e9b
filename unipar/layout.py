"""The arrangement of a run's processes: one size for each kind of parallelism."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass

from unipar.errors import ConfigError

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The axes whose sizes multiply to the number of processes, in their usual order."""

_MERGED = {
    "batch": ("dp_replicate", "dp_shard"),
    "fsdp": ("dp_shard", "cp"),
    "loss": ("dp_replicate", "dp_shard", "cp"),
}

MESHES = (
    ("pp", "dp_replicate", "fsdp", "tp"),
    ("pp", "batch", "cp", "tp"),
    ("pp", "loss", "tp"),
    ("pp", "dp_replicate", "efsdp", "ep", "tp"),
)
"""Ways to read the processes as a grid. Each has all of them, and no two axes that overlap."""


@dataclass(frozen=True)
class Layout:
    """The sizes of all kinds of parallelism, known before any process starts.

    ``dp_replicate * dp_shard * cp * tp * pp`` is the number of processes. ``ep`` is no factor of
    its own: it divides the ranks that share one replica's dense parameters, ``dp_shard * cp``, and
    the experts are then sharded over the rest of them.

    Ranks are counted with the last axis of ``order`` varying fastest. The default is from the axis
    that bears slow links best to the one that needs the fastest. Pipeline stages hand activations
    on to one neighbor, so ``pp`` is outermost, between nodes. Tensor parallelism waits for a
    reduction of activations in every layer, so ``tp`` is innermost, between neighbors of one node.

    Attributes:
        dp_replicate: copies of the sharded model, each of which trains on other samples.
        dp_shard: ranks that train on other samples and divide parameters, gradients or optimizer.
        cp: ranks that hold parts of each sequence (context parallelism).
        tp: ranks that hold parts of each layer (tensor parallelism).
        pp: ranks that hold other layers (pipeline parallelism).
        ep: ranks that hold other experts (expert parallelism).
        order: the five axes, the outermost first.

    Raises:
        ConfigError: a size is not positive, or ``ep`` divides nothing.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        # Merged axes are then runs of increasing ranks, as process groups have them.
        assert sorted(self.order) == sorted(AXES), self.order
        assert [axis for axis in self.order if axis in _MERGED["loss"]] == list(_MERGED["loss"])
        for axis in (*AXES, "ep"):
            if getattr(self, axis) < 1:
                raise ConfigError(
                    f"the layout has {axis}={getattr(self, axis)}. Set it to 1 or more, or leave "
                    "it out."
                )
        if self.fsdp % self.ep:
            divisors = [n for n in range(1, self.fsdp + 1) if self.fsdp % n == 0]
            raise ConfigError(
                f"the layout has ep={self.ep}, which does not divide dp_shard={self.dp_shard} "
                f"times cp={self.cp}, the ranks that experts are divided among. "
                f"Set ep to {_either(divisors)}."
            )

    # -- sizes -----------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """How many processes there are."""
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def batch(self) -> int:
        """How many shares a global batch falls into."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """How many ranks dense parameters are sharded over."""
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        """How many ranks the parameters of an expert are sharded over."""
        return self.fsdp // self.ep

    @property
    def loss(self) -> int:
        """How many ranks have a part of the loss of their own."""
        return self.batch * self.cp

    def check(self, size: int) -> None:
        """Hold it against the number of processes that there are.

        Raises:
            ConfigError: they are not as many; it says which numbers would do.
        """
        if self.size == size:
            return
        given = [f"{axis}={getattr(self, axis)}" for axis in self.order]
        replicas, left = divmod(size, self.size // self.dp_replicate)
        shards, rest = divmod(size, self.size // self.dp_shard)
        remedies = [f"start {self.size} processes"]
        if not left:
            remedies.append(f"set dp_replicate to {replicas}")
        if not rest and shards * self.cp % self.ep == 0:
            remedies.append(f"set dp_shard to {shards}")
        raise ConfigError(
            f"the layout {' * '.join(given)} is of {self.size} processes, and there are {size}. "
            f"{_either(remedies).capitalize()}."
        )

    # -- ranks -----------------------------------------------------------------------------------

    def coordinate(self, axis: str, rank: int) -> int:
        """Where a rank stands along an axis, merged axes (``batch``, ``fsdp``, …) included."""
        if axis == "ep":
            return self.coordinate("fsdp", rank) % self.ep
        if axis == "efsdp":
            return self.coordinate("fsdp", rank) // self.ep
        place = 0
        for part in _MERGED.get(axis, (axis,)):
            size = getattr(self, part)
            place = place * size + rank // self._stride(part) % size
        return place

    def _stride(self, axis: str) -> int:
        inner = self.order[self.order.index(axis) + 1 :]
        return math.prod(getattr(self, name) for name in inner)

    def leads(self, rank: int) -> bool:
        """Return whether the loss and metrics of this rank count.

        Of the ranks that hold parts of one model only the last pipeline stage has them, and all
        its tensor-parallel ranks have the same. Each rank along ``cp`` has another part.
        """
        return self.coordinate("pp", rank) == self.pp - 1 and self.coordinate("tp", rank) == 0

    def stream(self, rank: int) -> int:
        """Which stream of random numbers a rank draws dropout from.

        Replicas draw others than each other, and so do the layers of different stages; ranks that
        hold parts of the same layers draw alike.
        """
        return self.coordinate("batch", rank) + self.batch * self.coordinate("pp", rank)

    def ranks(self) -> list[int]:
        """All ranks in the order of :data:`AXES`: every grid of :data:`MESHES` is a view of it."""
        strides = [self._stride(axis) for axis in AXES]
        places = itertools.product(*(range(getattr(self, axis)) for axis in AXES))
        return [sum(map(operator.mul, place, strides)) for place in places]

    def grid(self, *names: str) -> tuple[str, ...]:
        """The axes of the grid that has all of ``names``, without others of size 1.

        Raises:
            ConfigError: no grid has them together, or one of them is of size 1.
        """
        found = next((axes for axes in MESHES if set(names) <= set(axes)), None)
        if found is None:
            grids = "; ".join(", ".join(axes) for axes in MESHES)
            raise ConfigError(
                f"no mesh has the axes {', '.join(names)}. Ask for axes of one of these: {grids}."
            )
        # What is reduced over may be one rank alone.
        kept = tuple(a for a in found if a in _REDUCED or getattr(self, a) > 1)
        for name in names:
            if name not in kept:
                raise ConfigError(
                    f"there is no mesh over '{name}', of which the layout has 1. "
                    f"Ask for it where layout.{name} > 1."
                )
        return kept


_REDUCED = frozenset({"fsdp", "efsdp", "batch", "loss"})


def _either(choices: Iterable[object]) -> str:
    *most, last = map(str, choices)
    return f"{', '.join(most)} or {last}" if most else last
