"""Losses that a rank computes from its part of a model.

A penalty of the weights, attention weights, what a layer has inside: where ranks hold parts of
layers as plain tensors, or some of the layers, each of them gets another number than the whole
model's, and gradients of its own part of it, and nothing tells.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from unipar.engine.outputs import tensors_of
from unipar.errors import ConfigError

_WHOLE, _PART = "unipar: what every rank has whole", "unipar: what this rank has a part of"


class WholeLosses:
    """Refuses losses that lead to a part of the weights past every module that gives whole tensors.

    Called with each loss before its backward pass; it looks at the graph between the loss and those
    modules, and at nothing on the device.

    Args:
        parts: the parameters of which this rank has a part, or which are a part of the model's, by
            name.
        whole: the modules whose outputs are what the whole model's would be.
        strategy: its name, for the message.
    """

    def __init__(
        self,
        parts: Mapping[str, torch.Tensor],
        whole: Iterable[nn.Module],
        strategy: str,
    ) -> None:
        self._names = {id(parameter): name for name, parameter in parts.items()}
        self._strategy = strategy
        self._handles = [module.register_forward_hook(_mark_whole) for module in whole]

    def __call__(self, loss: torch.Tensor) -> None:
        """Refuse a loss that depends on a part.

        Raises:
            ConfigError: it does.
        """
        for name in self._parts_of(loss):
            raise ConfigError(
                f"{self._strategy}: the loss depends on '{name}' by another way than the model's "
                "output, and each rank holds a part of the model: a penalty of the weights, "
                "attention weights, or what a layer computes inside. Compute the loss from what "
                "every rank has whole, such as logits. A penalty of the weights is weight_decay of "
                "the optimizer. Or use a strategy that divides no layers, such as 'ddp'."
            )

    def _parts_of(self, loss: torch.Tensor) -> Iterator[str]:
        """Names of the parts that a loss is computed from, but for those behind what is whole."""
        todo: list[Node | None] = [loss.grad_fn]
        seen: set[Node] = set()
        while todo:
            node = todo.pop()
            if node is None or node in seen or _WHOLE in (notes := _notes(node)):
                continue
            seen.add(node)
            # The second is where the gradient of a parameter is accumulated.
            name = notes.get(_PART) or self._names.get(id(getattr(node, "variable", None)))
            if name is not None:
                yield name
            todo += [before for before, _ in node.next_functions]

    def close(self) -> None:
        """Take the hooks off the modules."""
        for handle in self._handles:
            handle.remove()


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The modules within a module, itself included, that have parameters of their own."""
    return [m for m in module.modules() if any(True for _ in m.parameters(recurse=False))]


def mark_whole(tensor: torch.Tensor) -> None:
    """Note of an activation that every rank has it whole."""
    _note(tensor, _WHOLE, True)


def mark_part(tensor: torch.Tensor, name: str) -> None:
    """Note of an activation that each rank has a part of it.

    Args:
        tensor: what this rank has.
        name: of the layer that has computed it.
    """
    _note(tensor, _PART, name)


def _note(tensor: torch.Tensor, key: str, value: Any) -> None:
    # A compiler traces no nodes of the graph that it makes.
    if not torch.compiler.is_compiling() and tensor.grad_fn is not None:
        _notes(tensor.grad_fn)[key] = value


def _mark_whole(module: nn.Module, args: Any, output: Any) -> None:
    for tensor in tensors_of(output):
        mark_whole(tensor)


def _notes(node: Any) -> dict[Any, Any]:
    """Of a node of the graph: a property, where its class has a method (torch 2.13)."""
    return node.metadata
