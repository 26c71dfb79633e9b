"""``fabric.save`` and ``fabric.load`` under any strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unipar.errors import ConfigError
from unipar.migrated import script
from unipar.strategy import Engine
from unipar.world import World

Filter = Callable[[str, Any], bool]


def save(path: Any, state: Any, keep: Mapping[str, Filter], world: World) -> None:
    """Write what ``state`` holds on rank 0. Collective.

    Optimizers of strategies that leave them whole are written as plain PyTorch's, the others' by
    the names of parameters; :func:`load` takes both.
    """
    if isinstance(state, Mapping):
        found: Any = {}
        for name, value in state.items():
            found[name] = _state_of(value)
            if name in keep:
                found[name] = {k: v for k, v in found[name].items() if keep[name](k, v)}
    else:
        found = _state_of(state)
    if world.is_main:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        torch.save(found, path)
    world.barrier()


def load(path: Any, state: Any, *, strict: bool, weights_only: bool | None) -> dict[str, Any]:
    """Take over what is in a file. Collective.

    Raises:
        ConfigError: something that is asked for is not in it.
    """
    found = torch.load(path, map_location="cpu", weights_only=weights_only)
    if state is None:
        return found
    if isinstance(state, (nn.Module, Optimizer)):
        _take(state, found, strict=strict)
        return {}
    missing = [name for name in state if name not in found]
    if missing and strict:
        raise ConfigError(
            f"{path} holds {', '.join(found)}, and not {', '.join(missing)}. "
            "Leave these out of the state, or pass strict=False."
        )
    assert isinstance(state, MutableMapping)
    for name in [name for name in state if name in found]:
        value = found.pop(name)
        if hasattr(state[name], "load_state_dict"):
            _take(state[name], value, strict=strict)
        else:
            state[name] = value
    return found


def _state_of(value: Any) -> Any:
    if _is_divided(value):
        return script.gathered(value).state_dict()
    return value.state_dict() if hasattr(value, "state_dict") else value


def _take(value: Any, state: Mapping[str, Any], *, strict: bool) -> None:
    if isinstance(value, Optimizer):
        named = any(isinstance(name, str) for name in state["state"])
        if _is_divided(value) and not named:
            state = _by_name(script.engine(value), state)
        if _is_divided(value) or named:
            script.gathered(value).load_state_dict(state)
        else:
            value.load_state_dict(dict(state))
    elif _is_divided(value):
        script.gathered(value).load_state_dict(state)
    elif isinstance(value, nn.Module):
        value.load_state_dict(state, strict=strict)
    else:
        value.load_state_dict(state)


def _is_divided(value: Any) -> bool:
    """Return whether the strategy divides a model or an optimizer among ranks."""
    if not isinstance(value, (nn.Module, Optimizer)) or not script.is_prepared(value):
        return False
    parts = {"parameters"} if isinstance(value, nn.Module) else {"parameters", "optimizer"}
    return bool(script.open().capabilities.sharded & parts)


def _by_name(engine: Engine, state: Mapping[str, Any]) -> dict[str, Any]:
    """A plain optimizer's state dict by the names of parameters instead of by their numbers."""
    names = [group.params for group in engine.export_state().groups]
    every = [name for group in names for name in group]
    return {
        "state": {every[number]: values for number, values in state["state"].items()},
        "param_groups": [
            {**group, "params": list(own)}
            for group, own in zip(state["param_groups"], names, strict=True)
        ],
    }
