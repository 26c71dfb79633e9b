"""ZeRO-1's and ZeRO-2's state in canonical form: each rank describes its part of each moment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from unipar.engine import (
    export_scheduler,
    flat_state,
    group_states,
    import_scheduler,
    restore_groups,
)
from unipar.errors import CheckpointError
from unipar.plain import from_json, to_json
from unipar.state import EngineState, LocalState, StateSource, named_weights

Groups = list[tuple[str, ...]]


def export_state(
    module: nn.Module, zero: Any, groups: Groups, scheduler: LRScheduler | None, rank: int
) -> EngineState:
    """Describe weights, optimizer and scheduler; nothing is gathered."""
    weights, aliases = named_weights(module)
    moments: list[LocalState] = []
    scalars: dict[str, dict[str, Any]] = {}
    for name, parameter, master in _parts(module, zero):
        for key, value in zero.optim.state.get(master, {}).items():
            full = f"{name}.{key}"
            if isinstance(value, torch.Tensor) and value.ndim:
                moments.append(_part(full, parameter, value, rank))
            elif isinstance(value, torch.Tensor):
                moments.append(LocalState.of(full, value))
            elif value is not None:
                scalars.setdefault(name, {})[key] = to_json(value, f"optimizer state '{full}'")
    state = EngineState(
        [LocalState.of(name, tensor) for name, tensor in weights.items()],
        moments,
        group_states(groups, zero.optim),
        {"scalars": scalars},
        aliases,
    )
    export_scheduler(scheduler, state)
    return state


def import_weights(source: StateSource, module: nn.Module, zero: Any) -> None:
    """Fill the weights, and each rank's part of them that its optimizer updates. Collective."""
    weights, _ = named_weights(module)
    source.fill_weights([LocalState.of(name, tensor) for name, tensor in weights.items()])
    with torch.no_grad():
        zero.update_master_params(module)


def import_optimizer(
    source: StateSource,
    module: nn.Module,
    zero: Any,
    groups: Groups,
    scheduler: LRScheduler | None,
    rank: int,
) -> None:
    """Make the optimizer's state as it is stored, and fill it. Collective."""
    parts = list(_parts(module, zero))
    strangers = sorted(set(source.optimizer) - {name for name, _, _ in parts})
    if strangers:
        raise CheckpointError(
            f"the checkpoint holds optimizer state of {len(strangers)} parameters that this model "
            f"does not train: {', '.join(strangers[:8])}{', …' if len(strangers) > 8 else ''}."
        )
    states: list[LocalState] = []
    for name, parameter, master in parts:
        values: dict[str, Any] = {
            key: from_json(value)
            for key, value in source.extra.get("scalars", {}).get(name, {}).items()
        }
        for key, info in source.optimizer.get(name, {}).items():
            full = f"{name}.{key}"
            if info.shape == () and (key == "step" or parameter.ndim):
                values[key] = torch.zeros((), dtype=info.dtype)
                states.append(LocalState.of(full, values[key]))
            elif info.shape == tuple(parameter.shape):
                values[key] = torch.zeros_like(master, dtype=info.dtype)
                states.append(_part(full, parameter, values[key], rank))
            else:
                raise CheckpointError(
                    f"optimizer state '{full}' has shape {info.shape} and its parameter has "
                    f"{tuple(parameter.shape)}: ZeRO divides state as it does parameters. Resume "
                    "under a strategy that keeps the optimizer whole."
                )
        zero.optim.state.pop(master, None)
        if values:
            zero.optim.state[master] = values
    source.fill_optimizer(states)
    restore_groups(source.groups, groups, zero.optim)
    import_scheduler(scheduler, source)


def _parts(module: nn.Module, zero: Any) -> Iterator[tuple[str, nn.Parameter, torch.Tensor]]:
    """Each trained parameter, and the tensor that this rank's optimizer holds for it."""
    masters = zero.get_working_to_master_map()
    for name, parameter in module.named_parameters():
        if id(parameter) in masters:
            yield name, parameter, masters[id(parameter)]


def _part(name: str, parameter: nn.Parameter, held: torch.Tensor, rank: int) -> LocalState:
    """A rank holds an equal part of the parameter's elements; the last ones are padding."""
    start = min(rank * held.numel(), parameter.numel())
    own = held[: min(held.numel(), parameter.numel() - start)]
    return flat_state(name, tuple(parameter.shape), start, own)
