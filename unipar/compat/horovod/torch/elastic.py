"""``hvd.elastic`` with a number of ranks that stays: the loop runs once, from a shared state."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import Sampler

from unipar.compat.horovod.torch import calls as hvd
from unipar.compat.run import current
from unipar.compat.tables import Table


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Call a training function with its state, which all ranks get from the first."""

    @functools.wraps(func)
    def call(state: Any, *args: Any, **kwargs: Any) -> Any:
        state.sync()
        return func(state, *args, **kwargs)

    return call


class TorchState:
    """What a loop goes on from.

    Args:
        model: likewise.
        optimizer: likewise.
        kwargs: further values, which are attributes.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        self.model, self.optimizer = model, optimizer
        self._names = list(kwargs)
        self.__dict__.update(kwargs)

    def sync(self) -> None:
        """Give all ranks the first one's. Collective."""
        if self.model is not None and self.model.__dict__.get("_unipar") is None:
            hvd.broadcast_parameters(self.model.state_dict(), 0)
        if self.optimizer is not None:
            hvd.broadcast_optimizer_state(self.optimizer, 0)
        for name in self._names:
            value = self.__dict__[name]
            if isinstance(value, (int, float, str, bool)):
                self.__dict__[name] = hvd.broadcast_object(value, 0)

    def register_reset_callbacks(self, callbacks: Any) -> None:
        """Nothing: the number of ranks stays."""

    def commit(self) -> None:
        """Nothing: what a restart goes on from is written by ``save_state``."""

    save = restore = check_host_updates = on_reset = commit


class ElasticSampler(Sampler[int]):
    """Each rank's samples of an epoch, of those that are not processed yet."""

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch."""
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that a batch is processed."""
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Any) -> None:
        """Note that samples are processed."""
        self.processed_indices.update(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """This rank's samples of a batch."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def reset(self) -> None:
        """Deal what is left."""
        place = current.placement()
        left = [one for one in range(len(self.dataset)) if one not in self.processed_indices]
        self.remaining_indices, self.rank, self.num_replicas = left, place.rank, place.size
        self.num_samples = math.ceil(len(left) / place.size)
        self.total_size = self.num_samples * place.size
        self.indices = self._dealt()

    def state_dict(self) -> dict[str, Any]:
        """How far the epoch has come."""
        return {"epoch": self.epoch, "processed_indices": self.processed_indices}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self.epoch = state_dict["epoch"]
        self.processed_indices = state_dict["processed_indices"]
        self.reset()

    def _dealt(self) -> list[int]:
        order = self.remaining_indices[:]
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        order += order[: self.total_size - len(order)]
        return order[self.rank : self.total_size : self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        self.indices = self._dealt()
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples


__getattr__ = Table("horovod.torch.elastic").refusing(__name__)
