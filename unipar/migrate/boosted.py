"""What a script migrated from Colossal-AI calls beside :mod:`unipar.migrate.script`.

Names and arguments are those of Colossal-AI where the meaning is; Colossal-AI itself is not
imported.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from unipar.errors import ConfigError
from unipar.migrate import script


def launch(seed: int = 1024) -> None:
    """Join the processes, and seed the generators of Python, NumPy and torch. Collective."""
    script.open()
    _seed(seed)


def loader(
    dataset: Dataset[Any],
    batch_size: int,
    shuffle: bool = False,
    seed: int = 1024,
    drop_last: bool = False,
    pin_memory: bool = False,
    num_workers: int = 0,
    **options: Any,
) -> DataLoader:
    """A loader of this rank's share, as ``plugin.prepare_dataloader`` makes it.

    Args:
        dataset: of samples.
        batch_size: samples of a batch on this rank.
        shuffle: whether each epoch has an order of its own; ``sampler.set_epoch`` says which.
        seed: of the processes that load samples.
        drop_last: whether a last batch that is not full is left out.
        pin_memory: as ``DataLoader`` takes it.
        num_workers: likewise.
        options: further arguments of ``DataLoader``.
    """
    ranks = script.world()
    sampler = DistributedSampler(
        dataset, num_replicas=ranks.data_size, rank=ranks.data_rank, shuffle=shuffle
    )
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        worker_init_fn=functools.partial(_seed_worker, seed),
        drop_last=drop_last,
        pin_memory=pin_memory,
        num_workers=num_workers,
        **options,
    )


# -- files ---------------------------------------------------------------------------------------


def save_model(model: nn.Module, checkpoint: str | Path) -> None:
    """Write weights, at full shapes, into one file of ``torch.save``. Collective."""
    _save(script.gathered(model).state_dict(), checkpoint)


def load_model(model: nn.Module, checkpoint: str | Path) -> None:
    """Take over the weights of a file. Collective.

    Raises:
        ConfigError: it is a directory of shards.
    """
    script.gathered(model).load_state_dict(_load(checkpoint))


def save_optimizer(optimizer: Optimizer, checkpoint: str | Path) -> None:
    """Write an optimizer's state, by the names of parameters, into one file. Collective."""
    _save(script.gathered(optimizer).state_dict(), checkpoint)


def load_optimizer(optimizer: Optimizer, checkpoint: str | Path) -> None:
    """Take over what :func:`save_optimizer` has written. Collective.

    Raises:
        ConfigError: it is a directory of shards, or by the numbers of parameters.
    """
    script.gathered(optimizer).load_state_dict(_load(checkpoint))


def save_lr_scheduler(lr_scheduler: Any, checkpoint: str | Path) -> None:
    """Write a scheduler's state into one file. Collective."""
    _save(lr_scheduler.state_dict(), checkpoint)


def load_lr_scheduler(lr_scheduler: Any, checkpoint: str | Path) -> None:
    """Take over what :func:`save_lr_scheduler` has written."""
    lr_scheduler.load_state_dict(_load(checkpoint))


def _save(state: Any, checkpoint: str | Path) -> None:
    ranks = script.world()
    if ranks.is_main:
        Path(checkpoint).parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, checkpoint)
    ranks.barrier()


def _load(checkpoint: str | Path) -> Any:
    if Path(checkpoint).is_dir():
        raise ConfigError(
            f"{checkpoint} is a directory, as shard=True makes it. Save it anew with shard=False, "
            "and load that file."
        )
    return torch.load(checkpoint, map_location="cpu", weights_only=True)


# -- processes -----------------------------------------------------------------------------------


class Coordinator:
    """Who this process is, in the words of ``DistCoordinator``. Made on all ranks."""

    def __init__(self) -> None:
        self._world = script.world()

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._world.rank

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return self._world.size

    @property
    def local_rank(self) -> int:
        """This process's rank on its node."""
        return self._world.local_rank

    def is_master(self) -> bool:
        """Whether this is rank 0."""
        return self._world.is_main

    def is_node_master(self) -> bool:
        """Whether this is the first process of its node."""
        return self._world.local_rank == 0

    def is_last_process(self) -> bool:
        """Whether this is the last rank."""
        return self._world.rank == self._world.size - 1

    def print_on_master(self, msg: str) -> None:
        """Print on rank 0."""
        if self.is_master():
            print(msg)

    def print_on_node_master(self, msg: str) -> None:
        """Print in the first process of each node."""
        if self.is_node_master():
            print(msg)

    def block_all(self) -> None:
        """Wait until every rank is here. Collective."""
        self._world.barrier()

    @contextlib.contextmanager
    def priority_execution(self, executor_rank: int = 0) -> Iterator[None]:
        """The others wait until one rank has left the block. Collective."""
        if self.rank != executor_rank:
            self._world.barrier()
        yield
        if self.rank == executor_rank:
            self._world.barrier()

    def on_master_only(self) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator: the function on rank 0, and nothing elsewhere."""

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                return function(*args, **kwargs) if self.is_master() else None

            return call

        return decorate


class Logger:
    """A logger whose messages name the ranks that say them, as ``get_dist_logger`` gives it."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def info(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Log on some ranks; left out: on all."""
        self._log(logging.INFO, message, ranks)

    def warning(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Log on some ranks; left out: on all."""
        self._log(logging.WARNING, message, ranks)

    def error(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Log on some ranks; left out: on all."""
        self._log(logging.ERROR, message, ranks)

    def debug(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Log on some ranks; left out: on all."""
        self._log(logging.DEBUG, message, ranks)

    def _log(self, level: int, message: str, ranks: Sequence[int] | None) -> None:
        if ranks is None or script.placement().rank in ranks:
            self._logger.log(level, message)


def get_dist_logger(name: str = "unipar.script") -> Logger:
    """A logger that can speak on some ranks alone."""
    return Logger(name)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _seed_worker(seed: int, worker_id: int) -> None:
    _seed(seed)
