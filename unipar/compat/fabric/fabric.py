"""``Fabric``: its settings, what it sets up, and a step."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from unipar.compat.fabric import launching, seeding, settings
from unipar.compat.fabric.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator
from unipar.compat.fabric.building import Building
from unipar.compat.fabric.data import FabricDataLoader, set_up
from unipar.compat.fabric.exchange import Exchange
from unipar.compat.fabric.keeping import Keeping
from unipar.compat.fabric.strategies import Strategy
from unipar.compat.fabric.wrappers import FabricModule, FabricOptimizer, uncompiled
from unipar.compat.fabric_names import refuse
from unipar.compat.optimizers import training_in
from unipar.compat.run import current
from unipar.compat.several_optimizers import trained_by
from unipar.compat.tables import Table
from unipar.engine import COMPUTE_DTYPES
from unipar.errors import ConfigError
from unipar.session import Session


def _is_using_cli() -> bool:
    """Whether ``fabric run`` has started the script, which Fabric's own examples ask."""
    return os.environ.get("LT_CLI_USED") == "1"


class Fabric(Exchange, Building, Keeping):
    """Lightning's, over a run under any strategy that takes a script's own loop.

    Arguments are Fabric's. ``unipar.yaml`` and the environment win over ``strategy``, ``precision``
    and ``accelerator``, which are settings of the run and options of its strategy.

    Raises:
        ConfigError: a setting has no counterpart.
    """

    def __init__(
        self,
        *,
        accelerator: Any = "auto",
        strategy: Any = "auto",
        devices: Any = "auto",
        num_nodes: int = 1,
        precision: Any = None,
        plugins: Any = None,
        callbacks: Any = None,
        loggers: Any = None,
    ) -> None:
        self._asked = settings.read(accelerator, strategy, devices, num_nodes, precision, plugins)
        self._callbacks = _listed(callbacks)
        self._loggers = _listed(loggers)
        self._set_up_nothing()
        current.placement(self._asked.run.get("device", "auto"))
        if type(self).run is not Fabric.run:
            self.run = functools.partial(self._launched, self.run)

    def _set_up_nothing(self) -> None:
        # A script that has done with a model lets go of it, and so do we.
        self._models: WeakKeyDictionary[FabricModule, dict[str, Any]] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        # Sent to a process, where nothing is set up.
        return {k: v for k, v in self.__dict__.items() if k != "_models"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._set_up_nothing()

    # -- processes -------------------------------------------------------------------------------

    def launch(self, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Have as many processes as devices, and join them. Collective.

        Without a launcher, ``torchrun`` takes the place of this process, and runs the script from
        its beginning in each. Under ``ddp_spawn`` and its like, and in a notebook, the function is
        run in processes of its own.

        Args:
            function: called then, with this Fabric and the other arguments.
            args: of the function.
            kwargs: likewise.

        Returns:
            What it returns; on rank 0, where it has processes of its own.

        Raises:
            ConfigError: these processes cannot be started.
        """
        if function is None:
            return self._launched(None)
        if not callable(function):
            raise ConfigError(
                f"fabric.launch takes a function, and was given {function!r}. Write "
                "fabric.launch(main) instead of fabric.launch(main())."
            )
        return self._launched(functools.partial(function, self), *args, **kwargs)

    def _launched(self, function: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
        if count := launching.missing(self._asked.devices, self._asked.num_nodes):
            interactive = launching.is_interactive()
            if function is not None and (self._asked.spawns or interactive):
                # In a notebook Fabric forks whatever is asked for, but for ddp_spawn.
                forks = self._asked.forks or (interactive and not self._asked.spawns)
                run = functools.partial(function, *args, **kwargs)
                return launching.spawn(count, run, would_fork=forks)
            launching.run_again(count)
        current.open(self._asked.run)
        if self._asked.seeds_again:
            seeding.reset_seed()
        return function(*args, **kwargs) if function is not None else None

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What a class derived from this runs once its processes are there."""

    @property
    def _session(self) -> Session:
        """The open session; this opens it where every process is there."""
        if current.session is None:
            if launching.missing(self._asked.devices, self._asked.num_nodes):
                raise ConfigError(
                    f"Fabric(devices={self._asked.devices or 'auto'}) asks for several processes, "
                    "and there is one. Call fabric.launch() before everything else, or start the "
                    "script by torchrun."
                )
            current.open(self._asked.run)
        assert current.session is not None
        return current.session

    @property
    def strategy(self) -> Strategy:
        """Where this process stands; of no class that stands for one framework."""
        return Strategy()

    @property
    def accelerator(self) -> Accelerator:
        """What the run is on."""
        return CUDAAccelerator() if self.device.type == "cuda" else CPUAccelerator()

    # -- setting up ------------------------------------------------------------------------------

    def setup(
        self,
        module: nn.Module,
        *optimizers: Optimizer,
        scheduler: Any = None,
        move_to_device: bool = True,
        _reapply_compile: bool = True,
    ) -> Any:
        """Take over a model, and put it under the strategy with its optimizer. Collective.

        Args:
            module: the model.
            optimizers: its optimizer, or none.
            scheduler: comes back as it is.
            move_to_device: whether the model goes to this process's device.

        Returns:
            The model, with the optimizer and the scheduler if they are given.

        Raises:
            ConfigError: the strategy cannot train it so.
        """
        if scheduler is not None and self._asked.of_deepspeed:
            refuse("Fabric.setup(scheduler=…)")
        prepared = self.setup_module(module, move_to_device)
        wrapped = tuple(self._set_up(one) for one in optimizers)
        plain: Any = prepared.module
        if hasattr(plain, "_fabric"):
            # A LightningModule gives them to who asks (Fabric 2.6.6, fabric.py).
            plain._fabric_optimizers = list(wrapped)
        self.call("on_after_setup", fabric=self, module=prepared)
        if not wrapped:
            return prepared
        return (prepared, *wrapped, scheduler) if scheduler is not None else (prepared, *wrapped)

    def setup_module(
        self, module: nn.Module, move_to_device: bool = True, _reapply_compile: bool = True
    ) -> FabricModule:
        """Take over a model, which computes by itself until its optimizer comes."""
        if isinstance(module, FabricModule):
            raise ConfigError("this model was set up before. Give fabric.setup each model once.")
        plain, compiled = uncompiled(module)
        session = self._session
        assert current.config is not None
        precision = current.config.precision
        half = None if precision == "fp32" else COMPUTE_DTYPES[precision]
        device = self.device if move_to_device else None
        true = self._asked.true
        if true is not None:
            plain.to(true)
        if hasattr(plain, "_fabric"):
            # A LightningModule asks it for its logger, its optimizers and its backward pass, and
            # has hooks of callbacks (Fabric 2.6.6, fabric.py).
            known: Any = plain
            known._fabric = self
            if plain not in self._callbacks:
                self._callbacks.append(plain)
        wraps = session.world.size > 1 or self._asked.names_strategy
        prepared = FabricModule(plain, session, half=half, device=device, true=true, wraps=wraps)
        self._models[prepared] = {**self._asked.prepare, "compile": compiled}
        shares = not current.asks_for_own_buffers()
        if any(one.requires_grad for one in plain.parameters()):
            prepared.begins_alike = self._asked.by_ddp and shares
        else:
            prepared.share_weights(buffers=shares)
        return prepared

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Take over optimizers, and put their models under the strategy. Collective.

        Raises:
            ConfigError: one is of no model that was set up, or the strategy cannot train it so.
        """
        wrapped = tuple(self._set_up(one) for one in optimizers)
        return wrapped[0] if len(wrapped) == 1 else wrapped

    def _set_up(self, optimizer: Optimizer) -> FabricOptimizer:
        if isinstance(optimizer, FabricOptimizer):
            raise ConfigError("this optimizer was set up before. Set up each optimizer once.")
        session = self._session
        assert current.config is not None
        may_skip = current.config.precision == "fp16" or current.config.on_nan == "skip"
        wrapped = FabricOptimizer(optimizer, session, may_skip=may_skip, callbacks=self._callbacks)
        wrapped.same_parameters = self._asked.by_ddp
        wrapped.clears = not self._asked.of_deepspeed
        model: Any = wrapped.model_among(self._models)
        if model is None:
            raise ConfigError(
                f"the {type(optimizer).__name__} has no parameters of a model that was set up. Set "
                "up its model first, or both: model, optimizer = fabric.setup(model, optimizer)."
            )
        wrapped.takes_up(model, **self._models[model])
        return wrapped

    def setup_dataloaders(
        self,
        *dataloaders: DataLoader,
        use_distributed_sampler: bool = True,
        move_to_device: bool = True,
    ) -> Any:
        """This rank's share of each loader, as ``DistributedSampler`` makes it.

        Raises:
            ConfigError: a loader's batches cannot be shared.
        """
        world = self._session.world
        shared = use_distributed_sampler and (world.size > 1 or self._asked.names_strategy)
        device = self.device if move_to_device else None
        for one in dataloaders:
            if isinstance(one, FabricDataLoader) or not isinstance(one, DataLoader):
                raise ConfigError(
                    f"fabric.setup_dataloaders was given a {type(one).__name__}. Give each "
                    "DataLoader of torch once."
                )
        found = [set_up(one, world, device, shared=shared) for one in dataloaders]
        return found[0] if len(found) == 1 else found

    # -- a step ----------------------------------------------------------------------------------

    def backward(
        self, tensor: torch.Tensor, *args: Any, model: FabricModule | None = None, **kwargs: Any
    ) -> None:
        """Add the gradient of a loss.

        Args:
            tensor: the loss.
            model: what it trains, where several could be meant.

        Raises:
            ConfigError: it cannot be told which model the loss trains.
        """
        if args or kwargs:
            refuse("Fabric.backward(loss, retain_graph=…)")
        known = training_in(self._session, FabricOptimizer)
        optimizer, *beside = trained_by(tensor, known, model)
        optimizer.backward(tensor, likely_last=not current.unsynced, beside=beside)

    def clip_gradients(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor | None:
        """Have the next step clip a model's gradient.

        Args:
            module: the model.
            optimizer: its optimizer.
            clip_val: the most that an element of the gradient may be.
            max_norm: the 2-norm to clip to, instead.
            norm_type: 2.
            error_if_nonfinite: a gradient that is not finite is an error unless ``on_nan`` of
                ``unipar.yaml`` says otherwise.

        Returns:
            With ``max_norm`` the norm before, a scalar tensor; it can be read once the optimizer
            has stepped.

        Raises:
            ConfigError: the strategy cannot clip so.
        """
        if (clip_val is None) == (max_norm is None):
            raise ConfigError(
                f"clip_gradients(clip_val={clip_val}, max_norm={max_norm}): give one of them."
            )
        if norm_type != 2:
            refuse("Fabric.clip_gradients(norm_type=…)")
        if not isinstance(optimizer, FabricOptimizer) or optimizer.model is not module:
            raise ConfigError(
                "clip_gradients takes a model and its optimizer as fabric.setup gave them back."
            )
        if clip_val is not None:
            optimizer.clip_value(float(clip_val))
            return None
        assert max_norm is not None
        if not self._session.capabilities.clipping or not max_norm > 0:
            raise ConfigError(
                f"clip_gradients(max_norm={max_norm}) under strategy "
                f"'{self._session.strategy.name}': give a norm above 0, or use a strategy that "
                "clips."
            )
        limit = self._asked.prepare.get("max_grad_norm", max_norm)
        if limit != max_norm:
            raise ConfigError(
                f"DeepSpeed's gradient_clipping is {limit}, and clip_gradients clips to "
                f"{max_norm}. Give one of them."
            )
        return optimizer.clip(max_norm, self.device)

    def no_backward_sync(
        self, module: nn.Module, enabled: bool = True
    ) -> contextlib.AbstractContextManager[None]:
        """A block of backward passes that no step is to follow."""
        if not isinstance(module, FabricModule):
            raise ConfigError(
                "no_backward_sync takes a model that was set up: model = fabric.setup(model, …)."
            )
        return module.no_sync() if enabled else contextlib.nullcontext()

    @staticmethod
    def seed_everything(
        seed: int | None = None, workers: bool | None = None, verbose: bool = True
    ) -> int:
        """Seed all generators; workers of loaders have seeds of their own unless told otherwise."""
        return seeding.seed_everything(seed, workers is None or bool(workers), verbose)


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    return given if isinstance(given, list) else [given]


__getattr__ = Table("lightning_fabric.fabric").refusing(__name__)
