"""Hooks that are called with the gradient of a parameter."""

from __future__ import annotations

from typing import Any

from torch import nn


def gradient_hooks(parameter: nn.Parameter) -> list[Any]:
    """Those of ``register_hook`` and of ``register_post_accumulate_grad_hook``.

    torch 2.13, _tensor.py: nothing public says it.
    """
    before: Any = parameter._backward_hooks
    after: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return [hook for hooks in (before, after) for hook in (hooks or {}).values()]


def num_gradient_hooks(parameter: nn.Parameter) -> int:
    """How many they are, in a fraction of the time."""
    after: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return len(parameter._backward_hooks or ()) + len(after or ())
