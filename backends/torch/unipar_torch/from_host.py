"""Models that are divided among ranks from the host, so that none is ever whole on a device.

A model is divided while its tensors have no values, on the meta device, where they take no memory.
Then each rank allocates its own shards on its device, and rank 0 sends the values to the hosts of
all ranks, a few tensors at a time. Beyond what is divided, a device holds the buffers.

Values are copied, not made a second time: weights equal, bit for bit, those of the module that was
given, or those that calling the model function under the run's seed makes. Where no rank is to hold
them all (``initial_weights``), each computes or reads one tensor at a time, and keeps its shard.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from unipar.engine import broadcast_tensors
from unipar.engine.broadcast import in_pieces
from unipar.errors import ConfigError, first_few
from unipar.state import LocalState, is_dtensor
from unipar.strategy import EngineSpec, InitialValues, initial_values, seeded_model
from unipar.utils.torch_versions import meta_device
from unipar.world import World

Weights = dict[str, torch.Tensor]
"""Whole parameters and buffers, tied ones under each of their names; empty on other ranks than 0.
"""

_HOST = torch.device("cpu")
_PIECE_BYTES = 2**26


def host_model(
    spec: EngineSpec, world: World, strategy: str
) -> tuple[nn.Module, Weights | InitialValues]:
    """The module to divide, and rank 0's values of its tensors, or how each rank finds them.

    A module that was given is the one to divide. A model function is called on the meta device, and
    on rank 0 also on the host under the run's seed, unless ``initial_weights`` says otherwise.

    Raises:
        ConfigError: the model function cannot run on the meta device.
    """
    values = initial_values(spec)
    if values is not None:
        return values.module, values
    weights: Weights = {}
    if world.is_main:
        whole = seeded_model(spec)
        weights.update((n, p.detach()) for n, p in whole.named_parameters(remove_duplicate=False))
        weights.update(whole.named_buffers(remove_duplicate=False))
    if isinstance(spec.model, nn.Module):
        return spec.model, weights
    return on_meta(spec.model, strategy), weights


def on_meta(build: Callable[[], nn.Module], strategy: str) -> nn.Module:
    """Build a model whose tensors have shapes and no values.

    Raises:
        ConfigError: the model function cannot run on the meta device.
    """
    try:
        with meta_device():
            return build()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the model function cannot run on the meta device ({type(error).__name__}: {error}), "
            f"as {strategy} needs to divide a model while it is built. Build the module first and "
            "pass it instead of the function."
        ) from error


def take_values(module: nn.Module, strategy: str) -> None:
    """Replace all parameters and buffers by tensors on the meta device, tied ones by one.

    A gradient that comes to one that was replaced is refused from then on: a loss that uses a list
    of them would be of weights that nothing trains.

    Raises:
        ConfigError: a parameter is divided already.
    """
    replaced: dict[torch.Tensor, torch.Tensor] = {}
    for name, old in list(module.named_parameters(remove_duplicate=False)):
        if is_dtensor(old):
            raise ConfigError(
                f"{strategy}: parameter '{name}' of the model is divided already (a DTensor). Pass "
                "the model whole, and divide parts of it your own way by parallelize=."
            )
        if old not in replaced:
            new = nn.Parameter(torch.empty_like(old, device="meta"), old.requires_grad)
            # What a user has noted on it, for a `parallelize` of his own to read.
            vars(new).update(vars(old))
            replaced[old] = new
            if old.requires_grad:
                old.register_hook(functools.partial(_refuse_replaced, name, strategy))
        _set(module, name, replaced[old])
    for name, old in list(module.named_buffers(remove_duplicate=False)):
        if old not in replaced:
            replaced[old] = torch.empty_like(old, device="meta")
        _set(module, name, replaced[old])


def give_values(
    module: nn.Module, weights: Weights | InitialValues, world: World, *, offloaded: bool
) -> None:
    """Allocate this rank's shards and the buffers, and fill them with values. Collective.

    Args:
        module: divided, on the meta device.
        weights: rank 0's; emptied, so that the host can let go of each tensor once it is sent. Or
            how each rank finds them.
        world: the joined processes.
        offloaded: whether shards stay on the host.

    Raises:
        ConfigError: on rank 0, if the values are those of another model.
    """
    buffers = dict(module.named_buffers(remove_duplicate=False))
    ties = tied_names(module)
    module.to_empty(device=_HOST if offloaded else world.device)
    # Tied plain tensors are no longer one.
    held = dict(module.named_parameters(remove_duplicate=False))
    for name, first in ties.items():
        if held[name] is not held[first]:
            _set(module, name, held[first])
    # Buffers are computed with where they are.
    placed = {b: torch.empty_like(b, device=world.device) for b in set(buffers.values())}
    for name, buffer in buffers.items():
        _set(module, name, placed[buffer])
    targets = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if isinstance(weights, InitialValues):
        weights.fill(targets, world)
        return
    if world.is_main:
        _check_same_model(targets, weights)
    names = {tensor: name for name, tensor in targets.items()}
    for piece in in_pieces(targets.values(), _PIECE_BYTES):
        wholes = [
            weights.pop(names[target]).to(_HOST)
            if world.is_main
            else torch.empty(target.shape, dtype=target.dtype, device=_HOST)
            for target in piece
        ]
        broadcast_tensors(wholes, world)
        for target, whole in zip(piece, wholes, strict=True):
            LocalState.of("", target).take(whole)
    weights.clear()


def _refuse_replaced(name: str, strategy: str, gradient: torch.Tensor) -> None:
    raise ConfigError(
        f"{strategy}: a gradient came to parameter '{name}' as it was before the model was "
        "divided, when another tensor took its place. So the loss uses a list of parameters from "
        "before, or another model that shares this one, and no step would change what it sees. "
        "Take parameters from the model when they are used; outside of the model's own forward "
        "pass only with strategy='ddp', which keeps them the same."
    )


def notes_on(module: nn.Module) -> dict[str, dict[str, Any]]:
    """What a user has noted on parameters, such as which of them are not to decay."""
    return {name: dict(vars(parameter)) for name, parameter in module.named_parameters()}


def give_notes(
    named: Iterable[tuple[str, nn.Parameter]], notes: Mapping[str, Mapping[str, Any]]
) -> None:
    """Put notes on the parameters that stand in the place of those, for an optimizer to read."""
    for name, parameter in named:
        for key, value in notes.get(name, {}).items():
            vars(parameter).setdefault(key, value)


def tied_names(module: nn.Module) -> dict[str, str]:
    """The first name of each parameter, by each of its names."""
    first: dict[torch.Tensor, str] = {}
    named = module.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(parameter, name) for name, parameter in named}


def _check_same_model(targets: Weights, weights: Weights) -> None:
    wanted, found = (
        {name: (tuple(one.shape), one.dtype) for name, one in tensors.items()}
        for tensors in (targets, weights)
    )
    differing = [name for name, kind in wanted.items() if found.get(name) != kind]
    if differing:
        raise ConfigError(
            "the model function has built another model on the host than on the meta device: "
            f"{first_few(differing)} differ in shape or dtype. Let it build the same each time, or "
            "pass the module itself."
        )


def _set(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    owner, _, own = name.rpartition(".")
    setattr(module.get_submodule(owner), own, tensor)
