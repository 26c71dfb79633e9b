"""``hvd.elastic`` with a number of ranks that stays: the loop runs once, from a shared state."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Sampler

from unipar.compat.horovod.torch import calls as hvd
from unipar.compat.horovod_names import CALLS
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
        for name in ("model", "optimizer", *self._names):
            value = self.__dict__[name]
            if isinstance(value, nn.Module):
                if value.__dict__.get("_unipar") is None:
                    hvd.broadcast_parameters(value.state_dict(), 0)
            elif isinstance(value, Optimizer):
                hvd.broadcast_optimizer_state(value, 0)
            elif isinstance(value, ElasticSampler):
                value.load_state_dict(hvd.broadcast_object(value.state_dict(), 0))
            elif value is not None:
                self.__dict__[name] = hvd.broadcast_object(value, 0)

    def register_reset_callbacks(self, callbacks: Any) -> None:
        """Nothing: the number of ranks stays."""

    def commit(self) -> None:
        """Nothing: what a restart goes on from is written by ``save_state``."""

    save = check_host_updates = on_reset = commit

    def restore(self) -> None:
        """Refused: see :meth:`commit`.

        Raises:
            ConfigError: always.
        """
        CALLS.refuse("elastic.TorchState.restore()")


class ElasticSampler(Sampler[int]):
    """Each rank's samples of an epoch, of those that no rank has processed yet.

    All ranks are taken to have processed as many as this one: those at the beginning of the
    epoch's order.
    """

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that a batch is processed on every rank."""
        self.processed_num += batch_size * self.num_replicas

    def reset(self) -> None:
        """Deal what is left."""
        place = current.placement()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        left = order[self.processed_num :]
        self.remaining_indices, self.rank, self.num_replicas = left, place.rank, place.size
        self.num_samples = math.ceil(len(left) / place.size)
        self.total_size = self.num_samples * place.size

    def state_dict(self) -> dict[str, Any]:
        """How far the epoch has come."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def __iter__(self) -> Iterator[int]:
        missing = self.total_size - len(self.remaining_indices)
        dealt = [*self.remaining_indices, *self.remaining_indices[:missing]]
        self.indices = dealt[self.rank : self.total_size : self.num_replicas]
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples


__getattr__ = Table("horovod.torch.elastic").refusing(__name__)
