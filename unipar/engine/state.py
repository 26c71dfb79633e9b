"""The canonical state of a PyTorch module and optimizer, whole or sharded as DTensors."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unipar.combined import OPTIMIZER, optimizers_in
from unipar.engine.replaced import put_in_place
from unipar.errors import CheckpointError, ConfigError, first_few
from unipar.state import (
    EngineState,
    GroupState,
    LocalState,
    StateSource,
    TensorInfo,
    is_dtensor,
    named_weights,
)
from unipar.utils.json_state import check_like, from_json, to_json
from unipar.world import World

HOW_NOT_WHAT = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Hyperparameters that say how the optimizer computes on this device, so they are not restored."""


class ModelState(Protocol):
    """The state of a model and its optimizer in checkpoints, however they are divided."""

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters of the whole model."""
        ...

    def export_state(self) -> EngineState:
        """Describe weights and optimizer, nothing gathered or copied. Collective."""
        ...

    def import_weights(self, source: StateSource) -> None:
        """Fill weights and buffers from a stored state. Collective.

        Raises:
            CheckpointError: it does not fit this model.
        """
        ...

    def import_optimizer(self, source: StateSource) -> None:
        """Fill the optimizer from a stored state, if there is one. Collective.

        Raises:
            CheckpointError: it does not fit this optimizer.
        """
        ...


class ModuleState:
    """Of a module and an optimizer of PyTorch, whole or sharded as DTensors.

    Args:
        module: the user's module.
        optimizer: over its parameters, if there is one.
        world: the joined processes.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer | None, world: World) -> None:
        self.module, self.optimizer, self.world = module, optimizer, world

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def aliases(self) -> dict[str, str]:
        """Other names of tied weights, by the names that they are stored under."""
        return named_weights(self.module)[1]

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """The names of the parameters of each of the optimizer's groups."""
        assert self.optimizer is not None
        return group_names(self.module, self.optimizer)

    @property
    def trained(self) -> Collection[str]:
        """The names of the parameters that the optimizers of all ranks may update."""
        return {name for name, _ in self.module.named_parameters()}

    @property
    def partial(self) -> bool:
        """Whether ranks hold the optimizer's state of different parameters."""
        return self.optimizer is not None and _is_partial(self.optimizer)

    def weights(self) -> list[LocalState]:
        """Describe weights and buffers, all of them on each rank."""
        weights, _ = named_weights(self.module)
        return [LocalState.of(name, tensor) for name, tensor in weights.items()]

    def export_state(self) -> EngineState:
        state = EngineState(self.weights(), aliases=self.aliases)
        optimizer = self.optimizer
        if optimizer is not None:
            moments, scalars = _moments(self.module, optimizer)
            if self.partial:
                moments = _on_every_rank(moments, self.world)
                scalars = {k: v for some in self.world.gather(scalars) for k, v in some.items()}
            state.optimizer = moments
            state.groups = group_states(self.groups, optimizer)
            state.extra["scalars"] = scalars
        return state

    def import_weights(self, source: StateSource) -> None:
        source.fill_weights(self.weights())

    def import_optimizer(self, source: StateSource) -> None:
        optimizer = self.optimizer
        if optimizer is not None:
            states = _allocate_moments(source, self.module, optimizer, self.trained)
            source.fill_optimizer(states)
            restore_groups(source.groups, self.groups, optimizer)


def group_names(module: nn.Module, optimizer: Optimizer) -> list[tuple[str, ...]]:
    """The names of the parameters of each of the optimizer's groups."""
    names = {id(p): name for name, p in module.named_parameters()}
    return [tuple(names[id(p)] for p in group["params"]) for group in optimizer.param_groups]


def group_states(names: Sequence[tuple[str, ...]], optimizer: Optimizer) -> tuple[GroupState, ...]:
    """The optimizer's groups, whose parameters have these names."""
    return tuple(
        GroupState(
            params,
            {
                key: to_json(value, f"optimizer hyperparameter '{key}'")
                for key, value in group.items()
                if key not in {"params", "param_names"}
            },
        )
        for params, group in zip(names, optimizer.param_groups, strict=True)
    )


def export_scheduler(scheduler: LRScheduler | None, state: EngineState) -> None:
    """Add the scheduler's state, if there is one."""
    if scheduler is not None:
        state.extra["lr_scheduler"] = to_json(scheduler.state_dict(), "lr_scheduler")


def import_scheduler(scheduler: LRScheduler | None, source: StateSource) -> None:
    """Take over the stored scheduler, if there are both.

    Raises:
        CheckpointError: it is the state of another kind of scheduler.
    """
    if scheduler is not None and "lr_scheduler" in source.extra:
        own = scheduler.state_dict()
        state = from_json(source.extra["lr_scheduler"], like=own)
        check_like(state, own, "lr_scheduler")
        try:
            scheduler.load_state_dict(state)
        except Exception as error:
            raise CheckpointError(
                f"the stored lr_scheduler is none of {type(scheduler).__name__}: {error!r}."
            ) from error


def import_scaler(scaler: GradScaler, source: StateSource) -> None:
    """Take over the stored loss scale, if there is one.

    Raises:
        CheckpointError: it is no state that a gradient scaler can be in.
    """
    if "scaler" not in source.extra:
        return
    stored, own = source.extra["scaler"], scaler.state_dict()
    for key, value in own.items():
        if key not in stored:
            raise CheckpointError(f"scaler.{key} is missing in the checkpoint.")
        new = stored[key]
        check_like(new, value, f"scaler.{key}")
        may_be_0 = key == "_growth_tracker"
        if new is None or not (0 < new < math.inf or (new == 0 and may_be_0)):
            raise CheckpointError(f"scaler.{key} is {new} in the checkpoint.")
    scaler.load_state_dict(dict(stored))


def local_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that hold this rank's state (``ZeroRedundancyOptimizer`` wraps one)."""
    return [getattr(one, "optim", one) for one in optimizers_in(optimizer).values()]


def _is_partial(optimizer: Optimizer) -> bool:
    """Return whether ranks hold the state of different parameters."""
    return any(hasattr(one, "optim") for one in optimizers_in(optimizer).values())


def _local_parameters(
    module: nn.Module, optimizer: Optimizer
) -> Iterator[tuple[str, Any, dict[str, Any], Any]]:
    """Name, parameter, group and the mapping that has the state, of what this rank updates."""
    names = {id(p): name for name, p in module.named_parameters()}
    for local in local_optimizers(optimizer):
        put_in_place(local.param_groups)
        for group in local.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise ConfigError(
                        "the optimizer has a parameter that the model no longer has: a part of it "
                        "was replaced since the strategy took it, which knows nothing of the new "
                        "one. Replace parts before training, or build another optimizer and call "
                        "the model before its state is read, under a strategy that leaves weights "
                        "whole."
                    )
                yield names[id(parameter)], parameter, group, local.state


def _moments(
    module: nn.Module, optimizer: Optimizer
) -> tuple[list[LocalState], dict[str, dict[str, Any]]]:
    moments: list[LocalState] = []
    scalars: dict[str, dict[str, Any]] = {}
    for name, parameter, _, state in _local_parameters(module, optimizer):
        for key, value in state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                moments.append(LocalState.of(f"{name}.{key}", value))
            elif value is not None:
                where = f"optimizer state '{key}' of '{name}'"
                scalars.setdefault(name, {})[key] = to_json(value, where)
    return moments, scalars


def _on_every_rank(moments: list[LocalState], world: World) -> list[LocalState]:
    """The moments of all ranks in one order, those of other ranks as absent."""
    own = {moment.name: moment for moment in moments}
    listed: dict[str, TensorInfo] = {}
    for infos in world.gather([(m.name, m.shape, m.dtype) for m in moments]):
        listed.update({name: TensorInfo(shape, dtype) for name, shape, dtype in infos})
    return [own.get(name) or LocalState.absent(name, *listed[name]) for name in sorted(listed)]


def _allocate_moments(
    source: StateSource, module: nn.Module, optimizer: Optimizer, known: Collection[str]
) -> list[LocalState]:
    """Give each of this rank's parameters the state that is stored for it, yet to be filled."""
    scalars = source.extra.get("scalars", {})
    strangers = sorted(set(source.optimizer) - set(known))
    if strangers:
        raise CheckpointError(
            f"the checkpoint holds optimizer state of {len(strangers)} parameters that this model "
            f"does not have: {first_few(strangers, 8)}."
        )
    states: list[LocalState] = []
    for name, parameter, group, state in _local_parameters(module, optimizer):
        stored = source.optimizer.get(name, {})
        values: dict[str, Any] = dict(scalars.get(name, {}))
        for key, info in stored.items():
            values[key] = _allocate(f"{name}.{key}", key, info, parameter, group)
            states.append(LocalState.of(f"{name}.{key}", values[key]))
        # What the optimizer holds may be of a newer checkpoint, which turned out to be damaged.
        state.pop(parameter, None)
        if values:
            state[parameter] = values
    return states


def _allocate(
    name: str, key: str, info: TensorInfo, parameter: torch.Tensor, group: dict[str, Any]
) -> torch.Tensor:
    if key == "step" and info.shape == ():
        # PyTorch keeps step counters on the host unless the optimizer's kernel reads them.
        on_device = group.get("fused") or group.get("capturable")
        return torch.zeros((), dtype=info.dtype, device=parameter.device if on_device else "cpu")
    if info.shape == tuple(parameter.shape):
        return torch.zeros_like(parameter, dtype=info.dtype, requires_grad=False)
    if info.shape == ():
        # The same on every rank, such as a product that NAdam keeps.
        return torch.zeros((), dtype=info.dtype, device=parameter.device)
    if is_dtensor(parameter):
        raise CheckpointError(
            f"optimizer state '{name}' has shape {info.shape} and its parameter has "
            f"{tuple(parameter.shape)}: state that is not shaped like its parameter cannot be "
            "sharded. Resume under a strategy that keeps parameters whole."
        )
    return torch.zeros(info.shape, dtype=info.dtype, device=parameter.device)


def _hyperparameter(where: str, value: Any, own: Any) -> Any:
    value = from_json(value, like=own)
    check_like(value, own, where)
    is_number = isinstance(own, (int, float)) and not isinstance(own, bool)
    if is_number and (value is None or math.isnan(value)):
        raise CheckpointError(f"{where} is {value} in the checkpoint, and {own} in this run.")
    return value


def _one_of_several(name: str | None) -> str:
    return "the only optimizer" if name is None else f"the optimizer '{name}' of several"


def restore_groups(
    stored: tuple[GroupState, ...], names: Sequence[tuple[str, ...]], optimizer: Optimizer
) -> None:
    """Take over the stored hyperparameters of each group.

    Args:
        stored: the stored groups; none leaves the optimizer as it is.
        names: the names of the parameters of each of the optimizer's groups.
        optimizer: what takes them over.

    Raises:
        CheckpointError: the optimizer groups its parameters in another way, a group is of another
            one of several optimizers, or a value is of another kind than this optimizer has.
    """
    if not stored:
        return
    index_of = {name: index for index, group in enumerate(stored) for name in group.params}
    chosen: list[int] = []
    for number, params in enumerate(names):
        indices = {index_of.get(name) for name in params}
        if len(indices) > 1 or None in indices:
            raise CheckpointError(
                f"parameter group {number} of the optimizer ({len(params)} parameters) does "
                "not match one stored group: the checkpoint has groups of "
                f"{[len(g.params) for g in stored]} parameters, this optimizer "
                f"{[len(n) for n in names]}. Build the same groups as the saved run did."
            )
        index: Any = next(iter(indices), number)
        was, now = (
            values.get(OPTIMIZER)
            for values in (stored[index].hyperparameters, optimizer.param_groups[number])
        )
        if was != now:
            raise CheckpointError(
                f"the parameters of group {number} of the optimizer ({first_few(params)}) are of "
                f"{_one_of_several(was)} in the checkpoint, and of {_one_of_several(now)} in this "
                "run. Build the same groups, by the same names, as the saved run did."
            )
        chosen.append(index)
    for number, index in enumerate(chosen):
        group = optimizer.param_groups[number]
        for key, value in stored[index].hyperparameters.items():
            if key not in HOW_NOT_WHAT:
                group[key] = _hyperparameter(f"{key} of group {index}", value, group.get(key))
