"""The run of a script migrated from Lightning Fabric."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from unipar.data import move_to
from unipar.errors import ConfigError
from unipar.launch import detect
from unipar.migrated import script
from unipar.migrated.fabricated import states
from unipar.migrated.fabricated.data import EpochLoader, share
from unipar.migrated.fabricated.exchange import all_gather, all_reduce
from unipar.migrated.fabricated.training import seed_everything


class Run:
    """The rest of a ``Fabric`` when the strategy does the training.

    Args:
        devices: processes that :meth:`launch` starts where nothing else has: a number, a list of
            devices, or ``"auto"``: as many as there are GPUs.
        loggers: what :meth:`log` tells; Fabric's own, or any with ``log_metrics``.
    """

    def __init__(self, *, devices: Any = "auto", loggers: Any = None) -> None:
        self._devices = devices
        self.loggers = list(loggers) if isinstance(loggers, Sequence) else [loggers]
        self.loggers = [one for one in self.loggers if one is not None]

    # -- processes -------------------------------------------------------------------------------

    def launch(self, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Have as many processes as devices, and join them. Collective.

        Without a launcher, ``torchrun`` takes the place of this process, and runs the script from
        its beginning in each.

        Args:
            function: called then, with this run and the other arguments.

        Returns:
            What it returns.
        """
        count = _count(self._devices)
        if count > 1 and detect() is None:
            sys.stdout.flush()
            sys.stderr.flush()
            os.execv(sys.executable, [sys.executable, *_torchrun(count)])
        script.open()
        return function(self, *args, **kwargs) if function is not None else None

    @property
    def device(self) -> torch.device:
        """This process's device."""
        return script.device()

    @property
    def global_rank(self) -> int:
        """This process's rank."""
        return script.placement().rank

    @property
    def local_rank(self) -> int:
        """This process's rank among those of its node."""
        return script.placement().local_rank

    @property
    def node_rank(self) -> int:
        """Which node this is."""
        return script.placement().node_rank

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return script.placement().size

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.global_rank == 0

    def print(self, *values: Any, **options: Any) -> None:
        """``print`` in the first process of each node."""
        if self.local_rank == 0:
            print(*values, **options)

    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank is here. Collective."""
        script.world().barrier()

    @contextlib.contextmanager
    def rank_zero_first(self, local: bool = False) -> Iterator[None]:
        """The others wait until rank 0 (of each node) has left the block. Collective."""
        first = (self.local_rank if local else self.global_rank) == 0
        if not first:
            self.barrier()
        yield
        if first:
            self.barrier()
        self.barrier()

    # -- values ----------------------------------------------------------------------------------

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """One rank's value on every rank. Collective."""
        return script.world().gather(obj)[src]

    def all_gather(self, data: Any) -> Any:
        """Every rank's tensors, behind a new first dimension of ranks. Collective."""
        return all_gather(data, script.world())

    def all_reduce(self, data: Any, reduce_op: str = "mean") -> Any:
        """Mean or sum of tensors over ranks, which are changed in place. Collective."""
        return all_reduce(data, reduce_op, script.world())

    def to_device(self, obj: Any) -> Any:
        """A module, a tensor, or a collection of tensors on this process's device."""
        return obj.to(self.device) if isinstance(obj, nn.Module) else move_to(obj, self.device)

    # -- training --------------------------------------------------------------------------------

    def setup_dataloaders(
        self,
        *loaders: DataLoader,
        use_distributed_sampler: bool = True,
        move_to_device: bool = True,
    ) -> Any:
        """This rank's share of each loader, as ``DistributedSampler`` makes it.

        Raises:
            ConfigError: a loader's batches cannot be shared.
        """
        place = self.device if move_to_device else None
        shared: list[EpochLoader] = [
            share(one, script.session(), place, shared=use_distributed_sampler) for one in loaders
        ]
        return shared[0] if len(shared) == 1 else shared

    def no_backward_sync(
        self, module: nn.Module, enabled: bool = True
    ) -> AbstractContextManager[None]:
        """Nothing: an engine knows by itself when gradients are to be reduced."""
        return contextlib.nullcontext()

    def autocast(self) -> torch.autocast:
        """Autocast to the run's precision."""
        return script.autocast()

    @contextlib.contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        """Build a module on this process's device."""
        with self.device:
            yield

    init_tensor = init_module

    def seed_everything(
        self, seed: int | None = None, workers: bool | None = None, verbose: bool = True
    ) -> int:
        """:func:`seed_everything`."""
        return seed_everything(seed)

    # -- files -----------------------------------------------------------------------------------

    def save(
        self,
        path: Any,
        state: Any,
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write a state on rank 0, models and optimizers in it whole. Collective.

        Args:
            path: the file.
            state: a dictionary, also of objects that have a ``state_dict``.
            filter: by key of ``state``, which entries of a state dict to keep.
        """
        states.save(path, state, filter or {}, script.world())

    def load(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Take over what is written in a file. Collective.

        Args:
            path: the file.
            state: what takes it over: a dictionary, a model or an optimizer.
            strict: whether all that is asked for must be there.
            weights_only: as for ``torch.load``.

        Returns:
            What is left over.
        """
        return states.load(path, state, strict=strict, weights_only=weights_only)

    def load_raw(
        self, path: Any, obj: Any, strict: bool = True, weights_only: bool | None = None
    ) -> None:
        """Take over a file that holds the state dict of one model or optimizer. Collective."""
        states.load(path, obj, strict=strict, weights_only=weights_only)

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Tell all loggers of a value."""
        self.log_dict({name: value}, step)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Tell all loggers of several values."""
        told = {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in metrics.items()}
        for one in self.loggers:
            one.log_metrics(metrics=told, step=step)

    @property
    def logger(self) -> Any:
        """The first logger."""
        return self.loggers[0]


def _count(devices: Any) -> int:
    if isinstance(devices, (list, tuple)):
        return len(devices)
    if devices in ("auto", -1, "-1", None):
        return max(1, torch.cuda.device_count()) if script.device().type == "cuda" else 1
    if isinstance(devices, int) or (isinstance(devices, str) and devices.isdigit()):
        return int(devices)
    raise ConfigError(f"devices={devices!r} is no number. Give how many processes to start.")


def _torchrun(count: int) -> list[str]:
    """The arguments of Python that start this program again, in several processes."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["-m", spec.name.removesuffix(".__main__")] if spec is not None else [sys.argv[0]]
    run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    return [*run, *program, *sys.argv[1:]]
