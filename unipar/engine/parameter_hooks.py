"""Hooks on gradients of parameters, which must see what they would see in a plain loop."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from unipar.errors import ConfigError, first_few
from unipar.utils.gradient_hooks import num_gradient_hooks


class ParameterHooks:
    """Those that a model was prepared with, and those that it was given since.

    Frameworks have hooks of their own, which they add as they prepare a model.

    Args:
        before: names of parameters that had hooks before they were prepared.
        module: the prepared one.
        called: whether autograd calls hooks on its parameters, with gradients of their whole
            shape: not where the strategy divides the model.
        alone: whether this rank computes the gradients of whole global batches.
    """

    def __init__(
        self, before: Iterable[str], module: nn.Module, *, called: bool, alone: bool
    ) -> None:
        self._before, self._called, self._alone = list(dict.fromkeys(before)), called, alone
        named = list(module.named_parameters())
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._numbers = self._count()

    def check(self, *, is_whole: bool) -> None:
        """Refuse those that would be called with another gradient than a plain loop's, or not.

        Args:
            is_whole: whether the next backward pass is of the mean over all of what this rank has.

        Raises:
            ConfigError: there are such.
        """
        since = self._since()
        if since and not self._called:
            raise _lost(since)
        found = list(dict.fromkeys((*self._before, *since)))
        if not found or (is_whole and self._alone):
            return
        raise ConfigError(
            f"{first_few(found)} of the model: a hook on the gradient of a parameter would "
            "be called with what one rank has computed of one micro-batch, before it is divided by "
            "the number of items, and results would depend on how the batch is divided. Take the "
            "hook away, and change gradients as the optimizer steps: optimizer."
            "register_step_pre_hook(…), in the function that builds it, finds those of the global "
            "batch in parameter.grad, under strategies that leave them whole, such as ddp."
        )

    def check_called(self) -> None:
        """Refuse all of them, of a model on whose parameters autograd calls none.

        Raises:
            ConfigError: there are some.
        """
        if found := list(dict.fromkeys((*self._before, *self._since()))):
            raise _lost(found)

    def _since(self) -> list[str]:
        numbers = self._count()
        if numbers == self._numbers:
            return []
        each = zip(self._names, numbers, self._numbers, strict=True)
        return [name for name, now, then in each if now > then]

    def _count(self) -> list[int]:
        # A framework may watch what its parameters are asked.
        with torch._C.DisableTorchFunctionSubclass():
            return [num_gradient_hooks(parameter) for parameter in self._parameters]


def _lost(names: list[str]) -> ConfigError:
    return ConfigError(
        f"{first_few(names)} of the model: a hook was put on the gradient of a parameter, and the "
        "strategy divides the model, so the hook would be called with a part of the gradient, or "
        "not at all. Take it away, or use strategy='ddp'."
    )
