"""``torch.distributed.checkpoint.state_dict``: whole state dicts, under any strategy."""

from __future__ import annotations

from typing import Any

import torch.distributed.checkpoint.state_dict as real
from torch.optim import Optimizer

from unipar.compat.adopting import adoption
from unipar.compat.gathering import outer
from unipar.compat.native.calls import (
    adopted_of,
    load_whole_state_dict,
    named_state_dict,
    unwrapped,
    whole_state_dict,
)
from unipar.errors import ConfigError


def get_model_state_dict(
    model: Any, *, submodules: Any = None, options: Any = None
) -> dict[str, Any]:
    """The whole weights by name. Collective."""
    if adopted_of(model) is None:
        with adoption.engine_calls():
            found = real.get_model_state_dict(unwrapped(model))
    else:
        found = whole_state_dict(unwrapped(model), rank0_only=_first_alone(options))
    return _chosen(found, unwrapped(model), submodules, options)


def get_optimizer_state_dict(
    model: Any, optimizers: Any, *, submodules: Any = None, options: Any = None
) -> dict[str, Any]:
    """The whole state of an optimizer, by the names of its parameters. Collective.

    As torch's, it knows nothing of ``submodules``.
    """
    found: Any
    if adopted_of(model) is None:
        with adoption.engine_calls():
            found = real.get_optimizer_state_dict(unwrapped(model), optimizers)
    else:
        found = named_state_dict(_only(optimizers), rank0_only=_first_alone(options))
    if found and getattr(options, "flatten_optimizer_state_dict", False):
        # torch 2.8 to 2.13, distributed/checkpoint/state_dict.py.
        found = real._flatten_optim_state_dict(found)
    return found


def get_state_dict(
    model: Any, optimizers: Any, *, submodules: Any = None, options: Any = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both. Collective."""
    return (
        get_model_state_dict(model, submodules=submodules, options=options),
        get_optimizer_state_dict(model, optimizers, options=options),
    )


def set_model_state_dict(model: Any, model_state_dict: Any, *, options: Any = None) -> Any:
    """Take over whole weights, of all ranks or of the first. Collective."""
    strict = getattr(options, "strict", True)
    # They may be given by modules. torch 2.8 to 2.13, distributed/checkpoint/state_dict.py.
    given = real._unflatten_model_state_dict(unwrapped(model), model_state_dict)
    if adopted_of(model) is None:
        return unwrapped(model).load_state_dict(_shared(given, options), strict=strict)
    if given or _first_alone(options):
        return load_whole_state_dict(unwrapped(model), given, strict=strict)
    return None


def set_optimizer_state_dict(
    model: Any, optimizers: Any, optim_state_dict: Any, *, options: Any = None
) -> None:
    """Take over the whole state of an optimizer, likewise. Collective."""
    if adopted_of(model) is None:
        shared = _shared(optim_state_dict, options)
        with adoption.engine_calls():
            real.set_optimizer_state_dict(unwrapped(model), optimizers, shared)
    else:
        load_whole_state_dict(_only(optimizers), optim_state_dict)


def set_state_dict(
    model: Any,
    optimizers: Any,
    *,
    model_state_dict: Any,
    optim_state_dict: Any,
    options: Any = None,
) -> Any:
    """Both. Collective."""
    keys = set_model_state_dict(model, model_state_dict, options=options)
    set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    return keys


def _chosen(found: dict[str, Any], model: Any, submodules: Any, options: Any) -> dict[str, Any]:
    """What a script asks for of the weights of a model."""
    if getattr(options, "ignore_frozen_params", False):
        frozen = {outer(name) for name, p in model.named_parameters() if not p.requires_grad}
        found = {name: one for name, one in found.items() if name not in frozen}
    wanted = set(submodules or ())
    prefixes = [outer(f"{name}.") for name, one in model.named_modules() if one in wanted]
    if not prefixes:
        return found
    keeps = getattr(options, "keep_submodule_prefixes", True)
    return {
        name if keeps else name.removeprefix(prefix): one
        for name, one in found.items() for prefix in prefixes if name.startswith(prefix)
    }  # fmt: skip


def _first_alone(options: Any) -> bool:
    offloads = getattr(options, "full_state_dict", False) and getattr(options, "cpu_offload", False)
    return bool(offloads or getattr(options, "broadcast_from_rank0", False))


def _shared(state: Any, options: Any) -> Any:
    if not getattr(options, "broadcast_from_rank0", False):
        return state
    from unipar.compat.run import current

    world = current.world()
    return world.broadcast(state if world.is_main else None)


def _only(optimizers: Any) -> Any:
    if isinstance(optimizers, Optimizer):
        return optimizers
    first, *others = optimizers
    if others:
        raise ConfigError(
            f"the state of {len(others) + 1} optimizers: an engine steps a model by one. Get and "
            "set the state of the others by their own state_dict() and load_state_dict()."
        )
    return first
