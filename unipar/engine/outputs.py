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
_PLAIN = {dict, list, tuple, set, frozenset}
"""What has no attributes."""


def tensors_of(data: Any) -> Iterator[torch.Tensor]:
    """Every tensor in what a module gives, in containers and in attributes of any object."""
    # Kept for as long: what an attribute is made for would leave its address to another one.
    left, seen = [data], dict[int, Any]()
    while left:
        one = left.pop()
        if isinstance(one, torch.Tensor):
            yield one
            continue
        if one is None or isinstance(one, _CLOSED) or id(one) in seen:
            continue
        seen[id(one)] = one
        held: list[Any] = []
        if isinstance(one, Mapping):
            held += one.values()
        elif isinstance(one, (list, tuple, set, frozenset)):
            held += one
        if type(one) not in _PLAIN:
            held += _attributes(one)
        left += reversed(held)


def _attributes(data: Any) -> Iterator[Any]:
    yield from getattr(data, "__dict__", {}).values()
    for kind in type(data).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(data, name, None)


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
