"""Optimizer state over flat parts of parameters, in canonical form: each rank describes its own."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unipar.engine import (
    export_scheduler,
    flat_state,
    group_states,
    import_scheduler,
    restore_groups,
)
from unipar.errors import CheckpointError, first_few
from unipar.plain import from_json, to_json
from unipar.state import EngineState, LocalState, StateSource, TensorInfo
from unipar.world import World

Groups = list[tuple[str, ...]]


@dataclass(frozen=True)
class Part:
    """What this rank has of one parameter: consecutive elements, or none.

    Attributes:
        name: the parameter's.
        shape: the whole parameter's.
        start: its first element that is held here.
        held: the fp32 weights, shaped as the optimizer sees them; what is beyond the parameter's
            last element is padding.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    held: torch.Tensor

    def state(self, name: str, tensor: torch.Tensor) -> LocalState:
        """Describe a tensor that holds one value for each element that is held here."""
        own = tensor.view(-1)[: math.prod(self.shape) - self.start]
        return flat_state(name, self.shape, self.start, own)

    def has_scalar(self, key: str, shape: tuple[int, ...]) -> bool:
        """Whether optimizer state of that shape is one number for the whole parameter."""
        return shape == () and (key == "step" or bool(self.shape))


Parts = Iterable[tuple[torch.Tensor, Part]]
"""The tensors that the optimizer holds on this rank, and what of the model each of them is."""


def export_optimizer(
    state: EngineState,
    parts: Parts,
    optimizer: Optimizer,
    groups: Groups,
    scheduler: LRScheduler | None,
    world: World,
) -> None:
    """Add optimizer and scheduler to a state; no tensor is gathered. Collective."""
    own: dict[str, LocalState] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for holder, part in parts:
        for key, value in optimizer.state.get(holder, {}).items():
            full = f"{part.name}.{key}"
            if not isinstance(value, torch.Tensor):
                if value is not None:
                    stored = to_json(value, f"optimizer state '{full}'")
                    scalars.setdefault(part.name, {})[key] = stored
            elif part.has_scalar(key, tuple(value.shape)):
                own[full] = LocalState.of(full, value)
            else:
                own[full] = part.state(full, value)
    # A rank knows the state of what it holds only, and all describe the same in one order.
    listed: dict[str, TensorInfo] = {}
    known = [(one.name, one.shape, one.dtype) for one in own.values()]
    for infos, more in world.gather((known, scalars)):
        listed.update({name: TensorInfo(shape, dtype) for name, shape, dtype in infos})
        scalars.update(more)
    state.optimizer = [
        own.get(name) or LocalState.absent(name, *listed[name]) for name in sorted(listed)
    ]
    state.groups = group_states(groups, optimizer)
    state.extra["scalars"] = scalars
    export_scheduler(scheduler, state)


def import_optimizer(
    source: StateSource,
    parts: Parts,
    trained: Collection[str],
    optimizer: Optimizer,
    groups: Groups,
    scheduler: LRScheduler | None,
) -> None:
    """Make this rank's part of the optimizer's state as it is stored, and fill it. Collective."""
    strangers = sorted(set(source.optimizer).difference(trained))
    if strangers:
        raise CheckpointError(
            f"the checkpoint holds optimizer state of {len(strangers)} parameters that this model "
            f"does not train: {first_few(strangers, 8)}."
        )
    states: list[LocalState] = []
    for holder, part in parts:
        values: dict[str, Any] = {
            key: from_json(value)
            for key, value in source.extra.get("scalars", {}).get(part.name, {}).items()
        }
        for key, info in source.optimizer.get(part.name, {}).items():
            full = f"{part.name}.{key}"
            if part.has_scalar(key, info.shape):
                values[key] = torch.zeros((), dtype=info.dtype)
                states.append(LocalState.of(full, values[key]))
            elif info.shape == part.shape:
                # Not like `held`, which may be of a tensor class of Colossal-AI's own.
                values[key] = torch.zeros(
                    part.held.shape, dtype=info.dtype, device=part.held.device
                )
                states.append(part.state(full, values[key]))
            else:
                raise CheckpointError(
                    f"optimizer state '{full}' has shape {info.shape} and its parameter has "
                    f"{part.shape}: ranks divide state as they do parameters. Resume under a "
                    "strategy that keeps the optimizer whole."
                )
        optimizer.state.pop(holder, None)
        if values:
            optimizer.state[holder] = values
    source.fill_optimizer(states)
    restore_groups(source.groups, groups, optimizer)
    import_scheduler(scheduler, source)
