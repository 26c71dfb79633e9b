"""Losses that a rank computes from its parts of divided layers.

A penalty of the weights, attention weights, what a layer has inside: where ranks hold parts of
layers as plain tensors, each of them gets another number than the whole model's, and gradients of
its own part of it, and nothing tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from unipar.errors import ConfigError

_WHOLE = "unipar: what every rank has whole"


class WholeLosses:
    """Refuses losses that lead to a part of a weight past every layer that gives whole tensors.

    Called with each loss before its backward pass; it looks at the graph between the loss and those
    layers, and at nothing on the device.

    Args:
        module: the divided model.
        parts: the parameters of which this rank has a part, by name.
        gives_whole: whether a layer, one with parameters of its own, gives what all ranks have
            whole.
        strategy: its name, for the message.
    """

    def __init__(
        self,
        module: nn.Module,
        parts: Mapping[str, torch.Tensor],
        gives_whole: Callable[[nn.Module], bool],
        strategy: str,
    ) -> None:
        self._names = {id(parameter): name for name, parameter in parts.items()}
        self._strategy = strategy
        layers = [m for m in module.modules() if any(True for _ in m.parameters(recurse=False))]
        self._handles = [
            layer.register_forward_hook(_mark_whole) for layer in layers if gives_whole(layer)
        ]

    def __call__(self, loss: torch.Tensor) -> None:
        """Refuse a loss that depends on a part.

        Raises:
            ConfigError: it does.
        """
        for parameter in _leaves(loss):
            if name := self._names.get(id(parameter)):
                raise ConfigError(
                    f"{self._strategy}: the loss depends on '{name}' by another way than the "
                    "model's output, and each rank holds a part of it: a penalty of the weights, "
                    "attention weights, or what a layer computes inside. Compute the loss from "
                    "logits and hidden states. A penalty of the weights is weight_decay of the "
                    "optimizer. Or use a strategy that divides no layers, such as 'ddp'."
                )

    def close(self) -> None:
        """Take the hooks off the module."""
        for handle in self._handles:
            handle.remove()


def _mark_whole(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    if output.grad_fn is not None:
        _notes(output.grad_fn)[_WHOLE] = True


def _notes(node: Any) -> dict[Any, Any]:
    """Of a node of the graph: a property, where its class has a method (torch 2.13)."""
    return node.metadata


def _leaves(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that a loss is computed from, but for those behind what is marked as whole."""
    todo: list[Node | None] = [loss.grad_fn]
    seen: set[Node] = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen or _WHOLE in _notes(node):
            continue
        seen.add(node)
        # Where a gradient is accumulated.
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        todo += [before for before, _ in node.next_functions]
