"""Where torch's own calls are seen: optimizers that are built, modules that are called, losses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from unipar.engine.replaced import in_place


class Seer(Protocol):
    """What is told of them.

    Attributes:
        inside: whether an engine calls, so that all is left to torch.
        retains: whether the script wants the graph to be left by the engine's backward pass.
    """

    inside: bool
    retains: bool

    def note_optimizer(self, optimizer: Optimizer) -> None:
        """Take notice of an optimizer that has just been built."""

    def takes(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Whether a module that is called has another class now."""
        ...

    def backward(self, loss: torch.Tensor, given: dict[str, Any]) -> bool:
        """Whether a backward pass is done."""
        ...

    def gradients(
        self, take: Callable[[], Any], outputs: Any, inputs: Any, options: dict[str, Any]
    ) -> Any:
        """What ``torch.autograd.grad`` is to give, which ``take`` gives of this rank's samples."""
        ...


_seer: Any = None


def put(seer: Seer) -> None:
    """Tell of them from now on, until :func:`take_back`."""
    global _seer
    _seer = seer
    Optimizer.__init__ = _noting  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.backward = _routed  # pyright: ignore[reportAttributeAccessIssue]
    torch.autograd.backward = _routed_function
    torch.autograd.grad = _taken


def take_back() -> None:
    """Leave all of it to torch."""
    Optimizer.__init__ = _init  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.backward = _backward  # pyright: ignore[reportAttributeAccessIssue]
    torch.autograd.backward = _backward_function
    torch.autograd.grad = _grad


def watch(calls: bool) -> None:
    """See every module that is called, or none."""
    nn.Module.__call__ = _watched if calls else _call  # pyright: ignore[reportAttributeAccessIssue]


_init, _call, _backward = Optimizer.__init__, nn.Module.__call__, torch.Tensor.backward
_backward_function, _grad = torch.autograd.backward, torch.autograd.grad


def _noting(self: Optimizer, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    _seer.note_optimizer(self)


def _watched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if _seer.takes(self, args, kwargs):
        # It has another class now.
        return self(*args, **kwargs)
    return _call(self, *args, **kwargs)


def _routed(
    self: torch.Tensor,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    # An engine's own backward pass comes here in every step.
    if not _seer.inside:
        asked = {"gradient": gradient, "retain_graph": retain_graph,
                 "create_graph": create_graph, "inputs": inputs}  # fmt: skip
        if _seer.backward(self, _given(asked)):
            return
    _backward(self, gradient, True if _seer.retains else retain_graph, create_graph, inputs)


def _routed_function(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    # Tensor.backward comes here, too, with what belongs to no engine.
    if not _seer.inside:
        asked = {"grad_tensors": grad_tensors, "retain_graph": retain_graph,
                 "create_graph": create_graph, "inputs": inputs}  # fmt: skip
        loss, given = tensors, _given(asked)
        if not isinstance(tensors, torch.Tensor):
            tensors, weights = list(tensors), given.pop("grad_tensors", None)
            if isinstance(weights, torch.Tensor):
                weights = [weights]
            loss = _sum_of(tensors, weights or [None] * len(tensors))
        if isinstance(loss, torch.Tensor) and _seer.backward(loss, given):
            return
    _backward_function(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)


def _sum_of(tensors: list[Any], weights: Sequence[Any]) -> torch.Tensor | None:
    """What has the gradient of several tensors by their weights; ``None`` if torch is to say."""
    terms = []
    for one, weight in zip(tensors, weights, strict=False):
        if not isinstance(one, torch.Tensor) or (weight is None and one.numel() != 1):
            return None
        if weight is not None and weight.shape != one.shape:
            return None
        terms.append(one.sum() if weight is None else (one * weight.detach()).sum())
    return sum(terms[1:], terms[0]) if len(terms) == len(tensors) > 0 else None


@functools.wraps(_grad)
def _taken(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    # They are looked at before torch does, and model.parameters() can be gone through once.
    if isinstance(outputs, Iterator):
        outputs = tuple(outputs)
    # Torch's own would call this one again for such as have functions of their own.
    inputs = in_place(tuple(inputs) if isinstance(inputs, Iterator) else inputs)

    def take() -> Any:
        return _grad(outputs, inputs, *args, **kwargs)

    if _seer.inside:
        return take()
    names = ("grad_outputs", "retain_graph", "create_graph")
    return _seer.gradients(
        take, outputs, inputs, {**dict(zip(names, args, strict=False)), **kwargs}
    )


def _given(asked: dict[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in asked.items() if one is not None and one is not False}
