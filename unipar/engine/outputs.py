"""Tensors in what modules give, which frameworks watch to know of backward passes.

They find them in the containers that each knows, and in no object of another class. A tensor that
they miss is one whose backward pass they do not see.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from unipar.errors import ConfigError

_CLOSED = (str, bytes, int, float, complex, type, types.ModuleType, types.FunctionType, nn.Module)
"""What holds no output."""


def tensors_of(data: Any) -> Iterator[torch.Tensor]:
    """Every tensor in what a module gives, in containers and in attributes of any object."""
    return _tensors(data, set())


def _tensors(data: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(data, torch.Tensor):
        yield data
        return
    if data is None or isinstance(data, _CLOSED) or id(data) in seen:
        return
    seen.add(id(data))
    held: list[Any] = []
    if isinstance(data, Mapping):
        held += data.values()
    elif isinstance(data, (list, tuple, set, frozenset)):
        held += data
    held += getattr(data, "__dict__", {}).values()
    for kind in type(data).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            held.append(getattr(data, name, None))
    for item in held:
        yield from _tensors(item, seen)


def refuse_hidden_outputs(
    module: nn.Module, strategy: str, finds: Callable[[Any], Iterator[torch.Tensor]]
) -> list[Callable[[], None]]:
    """Refuse outputs of a module, or of one in it, whose tensors a framework does not find.

    Args:
        module: with all modules that the framework watches.
        strategy: as the user calls it.
        finds: the tensors that the framework finds in an output.

    Returns:
        What takes the refusal back.
    """

    def check(part: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) or not torch.is_grad_enabled():
            return
        found = {id(tensor) for tensor in finds(output)}
        trained = [id(tensor) for tensor in tensors_of(output) if tensor.requires_grad]
        if trained and found.isdisjoint(trained):
            raise ConfigError(
                f"{strategy}: {_name_of(part, module)} gives a {type(output).__name__}, in which "
                "the framework finds no tensor, so that it would not see the backward pass. Give a "
                "tensor, or a tuple, list or dict of tensors."
            )

    hook: Any = torch.compiler.disable(check)
    return [part.register_forward_hook(hook).remove for part in module.modules()]


def _name_of(part: nn.Module, module: nn.Module) -> str:
    name = next(name for name, one in module.named_modules() if one is part)
    kind = type(part).__name__
    return f"module '{name}' ({kind})" if name else f"the model ({kind})"
