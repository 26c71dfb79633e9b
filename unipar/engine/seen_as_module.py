"""A wrapper around the user's module that a loss function may take for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


class SeenAsModule(nn.Module):
    """Has the mode of the module within it, and the names of what that holds.

    Attributes:
        module: the user's module.
    """

    module: nn.Module

    @property
    def training(self) -> bool:
        """Whether the user's module is in training mode, which is where modes are set."""
        return self.module.training

    @training.setter
    def training(self, value: bool) -> None: ...  # pyright: ignore[reportIncompatibleVariableOverride]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """By the names that they have in the user's module."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Likewise."""
        return self.module.named_buffers(*args, **kwargs)
