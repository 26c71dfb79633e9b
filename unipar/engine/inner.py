"""Gradients that a loss takes of its own model, before the engine's backward pass.

An adversarial step or a gradient penalty calls ``torch.autograd.grad`` on what the model gave. To a
framework that hangs gathering and reducing on its hooks, that is a backward pass like any other,
and the next one then computes with what it has left: other numbers, or an error of its own.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from unipar.engine.outputs import tensors_of
from unipar.errors import ConfigError

_passes = 0
_begun = 0


class Hiding(Protocol):
    """What has put stand-ins in the place of gradients."""

    def lifted(self) -> AbstractContextManager[None]:
        """Surround a pass with ``None`` where they are."""
        ...


HIDING: weakref.WeakSet[Hiding] = weakref.WeakSet()
"""All that have some at the moment."""


class backward_pass:
    """Around a backward pass of an engine's own; gradients may go through any engine's model."""

    def __enter__(self) -> None:
        global _passes, _begun
        _passes += 1
        _begun += 1
        self._lifted = contextlib.ExitStack()
        for one in list(HIDING) if HIDING else ():
            # Autograd adds in place to what it finds, and a stand-in has no memory for that.
            self._lifted.enter_context(one.lifted())

    def __exit__(self, *_: object) -> None:
        global _passes
        self._lifted.close()
        _passes -= 1


def in_backward_pass() -> bool:
    """Whether an engine of this process is in a backward pass, where it may compute again."""
    return _passes > 0


def passes_begun() -> int:
    """How many backward passes the engines of this process have begun."""
    return _begun


def refuse_inner_gradients(
    model: nn.Module, strategy: str, *, only_graphs: bool = False
) -> Callable[[], None]:
    """Refuse gradients of a model's outputs that no engine's backward pass asks for.

    Args:
        model: what the loss function calls, or the module in it.
        strategy: its name, for the message.
        only_graphs: whether to refuse ``create_graph=True`` alone.

    Returns:
        What takes the refusal back.
    """

    def check(grad: torch.Tensor) -> None:
        # Gradients are computed with gradients enabled where a graph of them is made.
        if not _passes and (torch.is_grad_enabled() or not only_graphs):
            raise _refusal(strategy, only_graphs)

    def watch(module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            for tensor in tensors_of(output):
                if tensor.requires_grad:
                    tensor.register_hook(check)

    hook: Any = torch.compiler.disable(watch)
    return model.register_forward_hook(hook).remove


def _refusal(strategy: str, only_graphs: bool) -> ConfigError:
    what = "with create_graph=True, before" if only_graphs else "before or without"
    remedy = (
        "Use strategy='ddp' or 'horovod', which bear it."
        if only_graphs
        else "Where it is the step's own, call backward(loss) of the engine, the accelerator or "
        "fabric in place of loss.backward(). Where it is another, use strategy='ddp' or 'horovod', "
        "which bear it."
    )
    return ConfigError(
        f"{strategy}: a gradient was taken through the model (torch.autograd.grad, or "
        f"loss.backward()) {what} the engine's own backward pass. {strategy} would take that for "
        f"the step's own, and could not compute the step's gradients any more. {remedy}"
    )
