"""Loss scales, which are in no gradient that a script holds.

An engine scales in fp16, and its step unscales what it steps. Its backward pass comes to other
tensors, too: to what has an optimizer of its own and no module (a learned temperature), and to
inputs. And where no engine scales, what a script has given a ``GradScaler`` is scaled here.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from unipar.engine import PrecisionPolicy, scale_gradients
from unipar.engine.graphs import nodes_behind
from unipar.engine.outputs import tensors_of

_SCALED_BY = "unipar.scaled_by"


class Scaler(Protocol):
    """A script's ``GradScaler``."""

    def is_enabled(self) -> bool:
        """Whether the script asks for scaling."""
        ...

    def scale_of(self, loss: torch.Tensor) -> torch.Tensor:
        """By what a backward pass of a loss is scaled."""
        ...

    def hand_on(self, policy: PrecisionPolicy) -> None:
        """Have an engine scale in its place, beginning as it would."""
        ...

    def has_handed_on(self, policy: PrecisionPolicy) -> bool:
        """Whether an engine scales in its place."""
        ...


SCALERS: weakref.WeakSet[Any] = weakref.WeakSet()
"""All of the script's."""


def note_scaled(outputs: Any, scaler: Scaler) -> None:
    """Note on losses that a script has them scaled."""
    for tensor in tensors_of(outputs):
        node: Any = tensor.grad_fn
        if node is not None:
            node.metadata[_SCALED_BY] = scaler


def scaler_of(loss: torch.Tensor) -> Scaler | None:
    """What a script has a loss, or a term of it, scaled by."""
    if not any(one.is_enabled() for one in SCALERS):
        return None
    found = (node.metadata.get(_SCALED_BY) for node in nodes_behind([loss.grad_fn]))
    return next((one for one in found if one is not None), None)


def computes_in_fp16(loss: torch.Tensor) -> bool:
    """Whether a gradient of it is in fp16 on its way, so that it may be too small for that."""
    return any(
        one.dtype is torch.float16
        for node in nodes_behind([loss.grad_fn])
        # torch 2.8 to 2.13, csrc/autograd/python_cpp_function.cpp.
        for one in node._input_metadata
    )


def leaves_of(loss: torch.Tensor) -> list[torch.Tensor]:
    """The tensors in which its backward pass leaves gradients."""
    found = (getattr(node, "variable", None) for node in nodes_behind([loss.grad_fn]))
    return [one for one in found if one is not None]


@contextlib.contextmanager
def unscaled(tensors: Sequence[torch.Tensor], scale: torch.Tensor) -> Iterator[None]:
    """Around a scaled backward pass, after which gradients are those of one that is not.

    Args:
        tensors: what has these gradients, which it may have already.
        scale: scalar.
    """
    _multiply(tensors, scale)
    try:
        yield
    finally:
        _multiply(tensors, scale.reciprocal())


def _multiply(tensors: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
    plain: list[torch.Tensor] = []
    for one in tensors:
        if one.grad is not None and one.grad.requires_grad:
            # It may be differentiated, as in PyTorch, and is not to change in place.
            one.grad = one.grad * factor.to(one.grad.device)
        else:
            plain.append(one)
    scale_gradients(plain, factor)


def run_scaled(loss: torch.Tensor, given: dict[str, Any]) -> None:
    """A backward pass that no engine makes, scaled if the script has the loss scaled.

    Args:
        loss: what it is of.
        given: arguments of ``backward`` or of ``torch.autograd.backward``.
    """
    rest = {k: v for k, v in given.items() if k not in ("gradient", "grad_tensors")}
    weights, scaler = given.get("gradient", given.get("grad_tensors")), scaler_of(loss)
    if scaler is None:
        torch.autograd.backward(loss, weights, **rest)
        return
    scale, inputs = scaler.scale_of(loss), given.get("inputs")
    if inputs is None:
        inputs = leaves_of(loss)
    else:
        inputs = rest["inputs"] = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    with unscaled(inputs, scale):
        torch.autograd.backward(loss * scale.to(loss.device), weights, **rest)


def found_overflow(tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """A scalar above 0 if a gradient of these is not finite; ``None`` if there is none."""
    grads = [one.grad for one in tensors if one.grad is not None]
    grads = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
    if not grads:
        return None
    # What is not finite makes no zero of zero.
    found = [(grad.detach() * 0).sum().float().ne(0).float().to(grads[0].device) for grad in grads]
    return torch.stack(found).amax()
