"""What Colossal-AI makes of a module, as a loss function sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from unipar.engine import SeenAsModule
from unipar.errors import ConfigError


class Boosted(SeenAsModule):
    """Calls what Colossal-AI has wrapped around the user's module, and lets its attributes be read.

    Attributes:
        module: the user's module.
    """

    def __init__(self, module: nn.Module, wrapper: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        # Not as a submodule, which would be the same parameters once more.
        object.__setattr__(self, "_wrapper", wrapper)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapper(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = getattr(super().__getattr__("module"), name)
        if callable(value):
            raise ConfigError(
                f"the loss function uses model.{name}, which goes around what Colossal-AI has "
                "wrapped around the model: its gradients would not be summed over ranks. Call "
                f"model(...) and let the module's forward use self.{name}."
            )
        return value
