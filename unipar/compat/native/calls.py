"""Functions of PyTorch's that reach the run: groups of processes, clipping, files, compiling."""

from __future__ import annotations

import os
import pickle
import urllib.parse
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unipar.compat.adopted import AdoptedModel, AdoptedOptimizer
from unipar.compat.adopting import adoption, close
from unipar.compat.native.scaling import refuse_scaled
from unipar.compat.run import current
from unipar.compat.several_optimizers import fetch_to_clip
from unipar.errors import ConfigError
from unipar.launch import detect


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    **kwargs: Any,
) -> None:
    """Join the processes, which a launcher or the script has started. Collective.

    Raises:
        ConfigError: it cannot be told where they meet; or others are joined already.
    """
    if current.unasked and world_size > 0 and world_size != current.placement().size:
        raise ConfigError(
            f"init_process_group(world_size={world_size}) comes after a model was trained, which "
            f"is a run of {current.placement().size} already. Call it before that."
        )
    adoption.note_aware()
    current.unasked = False
    if detect() is None:
        _describe(init_method or "env://", world_size, rank, store)
    # What gloo joins may be CPUs on a machine with GPUs, or GPUs.
    gloo = backend == "gloo"
    current.placement("cpu" if gloo else "auto", timeout)
    current.world(may_move=gloo)
    current.backend = backend


def is_initialized() -> bool:
    """Whether the script has joined the processes; an engine may have, for itself."""
    return dist.is_initialized() and not current.unasked


def get_rank(group: Any = None) -> int:
    """torch's, of what the script has joined."""
    _check_joined(group)
    return dist.get_rank(group)


def get_world_size(group: Any = None) -> int:
    """torch's, of what the script has joined."""
    _check_joined(group)
    return dist.get_world_size(group)


def _check_joined(group: Any) -> None:
    if group is None and not is_initialized():
        # torch's own words; what a script catches.
        raise ValueError(
            "Default process group has not been initialized, please make sure to call "
            "init_process_group."
        )


def get_backend(group: Any = None) -> str:
    """What the script has asked for, of the two that run side by side where there are GPUs."""
    found = dist.get_backend(group)
    whole = group is None or group is dist.group.WORLD
    asked = current.backend
    return asked if whole and asked in ("gloo", "nccl") and ":" in found else found


def _describe(init_method: str, world_size: int, rank: int, store: Any) -> None:
    """Say by the variables of torchrun where this process stands, as the script has said it."""
    where = urllib.parse.urlsplit(init_method)
    told = dict(urllib.parse.parse_qsl(where.query))
    own = str(told.get("rank", os.environ.get("RANK", rank) if rank < 0 else rank))
    size = str(
        told.get(
            "world_size", os.environ.get("WORLD_SIZE", world_size) if world_size < 0 else world_size
        )
    )
    known = own.isdecimal() and size.isdecimal()
    if store is not None or where.scheme not in ("tcp", "env") or not known:
        raise ConfigError(
            f"init_process_group(init_method={init_method!r}, rank={own}, world_size={size}): the "
            "processes meet at tcp://host:port or as variables say. Start them with torchrun, or "
            "give init_method='tcp://host:port', rank and world_size."
        )
    if where.scheme == "tcp":
        # Looked at with the other variables, when the processes join.
        port = where.netloc.rpartition(":")[2]
        os.environ |= {"MASTER_ADDR": where.hostname or "", "MASTER_PORT": port}
    os.environ |= {"RANK": own, "WORLD_SIZE": size, "LOCAL_RANK": os.environ.get("LOCAL_RANK", own),
                   "LOCAL_WORLD_SIZE": os.environ.get("LOCAL_WORLD_SIZE", size)}  # fmt: skip


def destroy_process_group(group: Any = None) -> None:
    """End the run; a group of ranks alone is torch's own to end."""
    if group is None or group is dist.group.WORLD:
        close()
    else:
        dist.destroy_process_group(group)


def clip_grad_norm_(
    parameters: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """torch's; the gradient of a whole model is clipped in the step that follows.

    Returns:
        The norm before; of such a model, a scalar that under a strategy that divides gradients can
        be read after the step.

    Raises:
        ConfigError: a strategy cannot clip so.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    trained, whole = adoption.optimizers_of(given)
    by_hand = whole and trained[0].is_by_hand
    # The norm that a step clips by is known too late to raise an error by it here.
    whole = whole and not by_hand and not error_if_nonfinite
    if whole and norm_type == 2 and max_norm > 0 and not trained[0].clips:
        if current.session is None or not current.session.capabilities.clipping:
            raise ConfigError("this strategy cannot clip gradients. Use another, or leave it out.")
        refuse_scaled()
        return trained[0].clip_given(float(max_norm), given)
    asked = f"clip_grad_norm_(max_norm={max_norm}, norm_type={norm_type}"
    asked += ", error_if_nonfinite=True)" if error_if_nonfinite else ")"
    refuse_scaled()
    fetch_to_clip(trained, f"{asked} of {len(given)} parameters")
    return nn.utils.clip_grad_norm_(given, max_norm, norm_type, error_if_nonfinite, foreach)


def clip_grad_value_(parameters: Any, clip_value: float, foreach: bool | None = None) -> None:
    """torch's, on the gradient that the step is by.

    Raises:
        ConfigError: a strategy has it elsewhere.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    refuse_scaled()
    fetch_to_clip(adoption.optimizers_of(given)[0], "clip_grad_value_")
    nn.utils.clip_grad_value_(given, clip_value, foreach)


def compile(model: Any = None, **options: Any) -> Any:
    """torch's; a module is compiled by the strategy, as it has divided it."""
    if isinstance(model, nn.Module):
        adoption.compiled[unwrapped(model)] = options or True
        return model
    return torch.compile(model, **options)


def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
    """torch's; in a script that knows nothing of ranks the first one writes. Collective then."""
    if adoption.aware or current.placement().size == 1:
        _save(obj, f, *args, **kwargs)
        return
    world = current.world(asked=False)
    if hasattr(f, "write") and not hasattr(f, "name"):
        # Each rank has one of its own in memory.
        _save(obj, f, *args, **kwargs)
        return
    # A file that is open is empty once the last rank has opened it.
    world.barrier()
    if world.is_main:
        _save(obj, f, *args, **kwargs)
    world.barrier()


def _save(obj: Any, *args: Any, **kwargs: Any) -> None:
    try:
        torch.save(obj, *args, **kwargs)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        if not isinstance(obj, nn.Module) or current.session is None:
            raise
        raise ConfigError(
            f"torch.save of a module: strategy '{current.session.strategy.name}' has hung "
            f"functions on it that cannot be pickled ({error}). Save its values: "
            "torch.save(model.state_dict(), …)."
        ) from error


# -- state of the whole run ----------------------------------------------------------------------


def whole_state_dict(of: Any, *, rank0_only: bool = False) -> dict[str, Any]:
    """The state dict of a model or an optimizer, whatever ranks divide. Collective.

    Names are those that its own ``state_dict()`` gives: of DistributedDataParallel ``module.…``.

    Args:
        of: the model or the optimizer.
        rank0_only: whether the other ranks get nothing of a model.
    """
    found = adopted_of(of)
    with adoption.engine_calls():
        if isinstance(found, AdoptedModel):
            whole = found.gathered(rank0_only=rank0_only).state_dict()
            return {f"module.{n}": one for n, one in whole.items()} if _wraps(of) else whole
        return found.export_numbered() if found is not None else of.state_dict()


def named_state_dict(optimizer: Any, *, rank0_only: bool) -> dict[str, Any]:
    """The whole state of an optimizer, by the names of its parameters. Collective."""
    found = adopted_of(optimizer)
    assert isinstance(found, AdoptedOptimizer)
    with adoption.engine_calls():
        return found.gathered(rank0_only=rank0_only).state_dict()


def load_whole_state_dict(of: Any, state_dict: dict[str, Any], *, strict: bool = True) -> Any:
    """Take over such a state dict. Collective.

    Args:
        of: the model or the optimizer.
        state_dict: on all ranks, or on rank 0 and empty elsewhere.
        strict: whether that of a model has to have all names, and no others.

    Returns:
        Of a model what its ``load_state_dict`` gives: names that are missing and unexpected.
    """
    found = adopted_of(of)
    with adoption.engine_calls():
        if isinstance(found, AdoptedModel):
            if _wraps(of) and all(name.startswith("module.") for name in state_dict):
                own = state_dict.items()
                state_dict = {name.removeprefix("module."): one for name, one in own}
            return found.gathered().load_state_dict(state_dict, strict=strict)
        if found is not None:
            return found.import_numbered(state_dict)
        return of.load_state_dict(state_dict, **({} if strict else {"strict": False}))


def save_state(directory: str | Path) -> Path:
    """Write a checkpoint of all that engines train, each rank its part. Collective.

    Raises:
        ConfigError: nothing is trained yet.
    """
    with adoption.engine_calls():
        return _session().save(directory)


def load_state(path: str | Path) -> int:
    """Take over a checkpoint of any strategy and number of ranks. Collective.

    Returns:
        The number of steps that it was saved after.

    Raises:
        ConfigError: nothing is trained yet: call it after the first forward pass.
    """
    with adoption.engine_calls():
        return _session().load(path)


def _session() -> Any:
    if current.session is None:
        raise ConfigError(
            "no engine trains a model yet: the first call of a model puts it under the strategy. "
            "Call it after that."
        )
    return current.session


def adopted_of(of: Any) -> AdoptedModel | AdoptedOptimizer | None:
    """The engine's side of a module or an optimizer, once it is trained."""
    return unwrapped(of).__dict__.get("_unipar")


def unwrapped(of: Any) -> Any:
    """A model without the wrapper around it, as torch names what is in it."""
    return of.module if _wraps(of) else of


def _wraps(of: Any) -> bool:
    return getattr(of, "_unipar_passes", False)
