"""``torch.distributed.checkpoint.state_dict``: whole state dicts, under any strategy."""

from __future__ import annotations

from typing import Any

import torch.distributed.checkpoint.state_dict as real

from unipar.compat.adopting import adoption
from unipar.compat.native.calls import (
    adopted_of,
    load_whole_state_dict,
    named_state_dict,
    whole_state_dict,
)


def get_model_state_dict(
    model: Any, *, submodules: Any = None, options: Any = None
) -> dict[str, Any]:
    """The whole weights by name. Collective."""
    if adopted_of(model) is None:
        with adoption.engine_calls():
            return real.get_model_state_dict(_inner(model), submodules=submodules)
    return whole_state_dict(model, rank0_only=_first_alone(options))


def get_optimizer_state_dict(
    model: Any, optimizers: Any, *, submodules: Any = None, options: Any = None
) -> dict[str, Any]:
    """The whole state of an optimizer, by the names of its parameters. Collective."""
    if adopted_of(model) is None:
        with adoption.engine_calls():
            return real.get_optimizer_state_dict(_inner(model), optimizers)  # pyright: ignore[reportReturnType]
    return named_state_dict(_only(optimizers), rank0_only=_first_alone(options))


def get_state_dict(
    model: Any, optimizers: Any, *, submodules: Any = None, options: Any = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both. Collective."""
    return (
        get_model_state_dict(model, options=options),
        get_optimizer_state_dict(model, optimizers, options=options),
    )


def set_model_state_dict(model: Any, model_state_dict: Any, *, options: Any = None) -> Any:
    """Take over whole weights, of all ranks or of the first. Collective."""
    if adopted_of(model) is None:
        strict = getattr(options, "strict", True)
        _inner(model).load_state_dict(_shared(model_state_dict, options), strict=strict)
    elif model_state_dict or _first_alone(options):
        load_whole_state_dict(model, model_state_dict)


def set_optimizer_state_dict(
    model: Any, optimizers: Any, optim_state_dict: Any, *, options: Any = None
) -> None:
    """Take over the whole state of an optimizer, likewise. Collective."""
    if adopted_of(model) is None:
        shared = _shared(optim_state_dict, options)
        with adoption.engine_calls():
            real.set_optimizer_state_dict(_inner(model), optimizers, shared)
    else:
        load_whole_state_dict(_only(optimizers), optim_state_dict)


def set_state_dict(
    model: Any,
    optimizers: Any,
    *,
    model_state_dict: Any,
    optim_state_dict: Any,
    options: Any = None,
) -> None:
    """Both. Collective."""
    set_model_state_dict(model, model_state_dict, options=options)
    set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)


def _inner(model: Any) -> Any:
    """A model without the wrapper around it, as torch names what is in it."""
    return model.module if getattr(model, "_unipar_passes", False) else model


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
    return optimizers[0] if isinstance(optimizers, (list, tuple)) else optimizers
