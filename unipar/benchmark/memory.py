"""The bytes that a rank holds in tensors, by purpose."""

from __future__ import annotations

import contextlib
import gc
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

Storages = dict[int, int]
"""The memory behind tensors, by its address: its size in bytes."""


class Held(NamedTuple):
    """Bytes of one rank at one moment, by what they are for.

    Attributes:
        parameters: behind the module's parameters.
        gradients: behind what parameters have as ``.grad``.
        optimizer: what optimizers keep, and the copies of parameters that they update.
        other: all other tensors, but for those of the data.
    """

    parameters: int
    gradients: int
    optimizer: int
    other: int


def storages() -> Storages:
    """The memory behind all tensors of this process."""
    return storages_of(_live(torch.Tensor))


def storages_of(tensors: Iterable[Any]) -> Storages:
    """The memory behind some tensors and their gradients."""
    found = list(tensors)
    # A gradient need not be known to Python as long as nobody has looked at it.
    found += [tensor.grad for tensor in found if tensor.is_leaf and tensor.grad is not None]
    # What is divided is held as a plain tensor, too, which is counted then.
    own = [tensor for tensor in found if not isinstance(tensor, DTensor) and not tensor.is_meta]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in own}


def held(module: nn.Module, data: Any) -> Held:
    """Count what this process holds now; best asked right before an update, when it is the most.

    Args:
        module: the user's module as the strategy has left it.
        data: what is trained on; the tensors that it refers to are not counted.
    """
    parameters = list(module.parameters())
    optimizers: list[Optimizer] = _live(Optimizer)
    updated = [p for one in optimizers for group in one.param_groups for p in group["params"]]
    kept = [value for one in optimizers for state in one.state.values() for value in _values(state)]
    # A framework that divides a parameter hangs this rank's part of it on the parameter.
    parts = [value for p in parameters for value in _values(vars(p))]
    everything = storages()
    taken: set[int] = set(_storages_referred(data))

    def size(tensors: Iterable[Any]) -> int:
        own = {
            place: everything[place]
            for place in _without_gradients(tensors)
            if place in everything and place not in taken
        }
        taken.update(own)
        return sum(own.values())

    gradients = [t.grad for t in [*parameters, *updated] if t.is_leaf and t.grad is not None]
    by_kind = (size([*parameters, *parts]), size(gradients), size([*kept, *updated]))
    rest = sum(size for place, size in everything.items() if place not in taken)
    return Held(*by_kind, rest)


def updates_copies(module: nn.Module) -> bool:
    """Return whether optimizers update copies of their own, which then go to the module."""
    updated = [p for one in _live(Optimizer) for group in one.param_groups for p in group["params"]]
    own = set(_without_gradients(module.parameters()))
    return any(place not in own for place in _without_gradients(updated))


@contextlib.contextmanager
def counting_saved(module: nn.Module) -> Iterator[list[int]]:
    """While entered, the first element is the most bytes that autograd has kept at once.

    What is kept several times is counted once, and parameters are not. What a checkpointed region
    keeps while it is computed again is not seen: only the innermost hooks are called.
    """
    most = [0]
    weights = {place for p in module.parameters() for place in _without_gradients([p])}
    live: dict[int, int] = {}
    uses: dict[int, int] = {}

    class Saved:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor
            self.place = tensor.untyped_storage().data_ptr()
            live[self.place] = tensor.untyped_storage().nbytes()
            uses[self.place] = uses.get(self.place, 0) + 1
            most[0] = max(most[0], sum(live.values()))

        def __del__(self) -> None:
            uses[self.place] -= 1
            if not uses[self.place]:
                del uses[self.place], live[self.place]

    def pack(tensor: torch.Tensor) -> Any:
        if any(isinstance(one, nn.Parameter) for one in (tensor, tensor._base)):
            return tensor
        return tensor if tensor.untyped_storage().data_ptr() in weights else Saved(tensor)

    def unpack(saved: Any) -> torch.Tensor:
        return saved.tensor if isinstance(saved, Saved) else saved

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield most


def _live(kind: type) -> list[Any]:
    # By their types: some modules' objects run code when they are asked for their class.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]


def _values(mapping: Any) -> list[torch.Tensor]:
    return [value for value in mapping.values() if isinstance(value, torch.Tensor)]


def _without_gradients(tensors: Iterable[Any]) -> Iterator[int]:
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if not local.is_meta:
            yield local.untyped_storage().data_ptr()


def _storages_referred(root: Any) -> Storages:
    """Behind the tensors that an object refers to, however deep."""
    found: list[torch.Tensor] = []
    seen, left = {id(root)}, [root]
    while left:
        thing = left.pop()
        if isinstance(thing, torch.Tensor):
            found.append(thing)
            continue
        for one in gc.get_referents(thing):
            if id(one) not in seen and not isinstance(one, _NO_DATA):
                seen.add(id(one))
                left.append(one)
    return storages_of(found)


_NO_DATA = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
