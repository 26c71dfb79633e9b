"""The stand-in in ``parameter.grad`` while that is not yet the gradient that a step is by.

With ``None`` there, a loop that clips or scales gradients by hand would do nothing, and not know.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from unipar.errors import ConfigError

HARMLESS = {
    *("device", "dtype", "grad", "grad_fn", "is_leaf", "is_sparse", "layout", "ndim", "shape"),
    # What looks at all tensors of a process to tell how large they are.
    *("element_size", "is_cpu", "is_cuda", "is_meta", "nelement", "numel", "untyped_storage"),
}
"""What tells of a tensor, and not of its values."""


class LoopCalls(NamedTuple):
    """The calls of a user's own loop, as messages name them; those of an engine unless told."""

    backward: str = "engine.backward(loss)"
    step: str = "engine.step()"
    clear: str = "engine.zero_grad()"
    clip: str = "prepare(…, max_grad_norm=…)"
    clip_to: str = "max_grad_norm=1.0"
    skip: str = "pass on_nan='skip'"


@dataclass
class Absence:
    """Why gradients are not there; one for all stand-ins of an engine.

    Attributes:
        calls: of the loop.
        fetch: puts the gradient of the step there, once it is asked for; ``None``: it cannot be
            had there.
        stepped: whether the step is done, and gradients are gone.
    """

    calls: LoopCalls = field(default_factory=LoopCalls)
    fetch: Callable[[], None] | None = None
    stepped: bool = False


def asked_for(func: Any) -> str:
    """The name of what ``__torch_function__`` is asked for: an operation's, or a property's."""
    # A property's getter is told by what it is the getter of.
    return getattr(getattr(func, "__self__", None), "__name__", "") or func.__name__


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # One for all, since each would be filled by a kernel of its own in every backward pass.
    return torch.zeros((), dtype=dtype, device=device)


class AbsentGradient(torch.Tensor):
    """Takes no memory. Who computes with it gets the gradient of the step, or is refused."""

    _why = Absence()
    _parameter: weakref.ref[nn.Parameter]

    @staticmethod
    def of(parameter: nn.Parameter, why: Absence) -> AbsentGradient:
        """One that fits into ``parameter.grad``."""
        nothing = _nothing(parameter.dtype, parameter.device)
        absent = nothing.expand(parameter.shape).as_subclass(AbsentGradient)
        absent._why, absent._parameter = why, weakref.ref(parameter)
        return absent

    def fit(self, parameter: nn.Parameter) -> None:
        """Have the shape that the parameter has now."""
        if self.shape != parameter.shape:
            self.data = _nothing(parameter.dtype, parameter.device).expand(parameter.shape)

    def present(self) -> torch.Tensor:
        """The gradient of the step; zeros where the parameter was not used. Collective."""
        assert self._why.fetch is not None
        self._why.fetch()
        parameter = self._parameter()
        found = None if parameter is None else parameter.grad
        if found is None or isinstance(found, AbsentGradient):
            with torch._C.DisableTorchFunctionSubclass():
                return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> AbsentGradient:
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = asked_for(func)
        if name in HARMLESS:
            return super().__torch_function__(func, types, args, kwargs or {})
        found: list[AbsentGradient] = []
        tree_map_only(AbsentGradient, found.append, (args, kwargs or {}))
        if found and all(one._why.fetch is not None for one in found):
            plain = tree_map_only(AbsentGradient, AbsentGradient.present, (args, kwargs or {}))
            return func(*plain[0], **plain[1])
        why = found[0]._why if found else cls._why
        calls = why.calls
        when, have = f"between {calls.backward} and {calls.step}", "have not summed them yet"
        if why.stepped:
            when, have = f"after {calls.step}", "have cleared them"
        raise ConfigError(
            f"parameter.grad was used {when}, and under this strategy gradients are not there: "
            f"each rank keeps a share of them elsewhere, or the ranks {have}. Clip by "
            f"{calls.clip}, and scale the loss instead of its gradient; or use a strategy that "
            "leaves gradients whole, such as ddp."
        )


def take_away(parameters: Iterable[nn.Parameter]) -> bool:
    """Leave no stand-in of an engine that is gone; whether there were some."""
    left = [one for one in parameters if isinstance(one.grad, AbsentGradient)]
    for one in left:
        one.grad = None
    return bool(left)
