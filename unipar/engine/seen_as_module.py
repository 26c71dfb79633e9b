"""A view of the user's module that a loss function may take for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from unipar.errors import ConfigError


class SeenAsModule(nn.Module):
    """Computes by what a framework has made of the user's module, and is that module in all else.

    It is an object of its own, for wrappers have attributes that models have, too: DDP's ``dim``
    is no model's.

    Args:
        module: the user's module.
        wrapper: what the framework has made of it.

    Attributes:
        module: the user's module.
        passed_by: what parts and methods of the module go around if they are used by themselves,
            so that they are refused; empty: they may be used.
    """

    module: nn.Module
    passed_by: ClassVar[str] = ""

    def __init__(self, module: nn.Module, wrapper: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        # Not as a submodule, which would be the same parameters once more.
        object.__setattr__(self, "_wrapper", wrapper)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapper(*args, **kwargs)

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

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        """Likewise."""
        return self.module.named_modules(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Likewise."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Likewise."""
        return self.module.load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = getattr(super().__getattr__("module"), name)
        return self._passing(f".{name}", value)

    def _passing(self, what: str, value: Any) -> Any:
        if self.passed_by and callable(value):
            raise ConfigError(
                f"the loss function uses model{what}, which goes around {self.passed_by}: its "
                "gradients would not be summed over ranks. Call model(...) and let the module's "
                f"forward use self{what}."
            )
        return value

    # Of containers, such as nn.Sequential; Python looks for these on the class alone.

    def __getitem__(self, key: Any) -> Any:
        part: Any = self.module
        return self._passing(f"[{key!r}]", part[key])

    def __iter__(self) -> Iterator[Any]:
        parts: Any = self.module
        return (self._passing(f"[{at}]", part) for at, part in enumerate(parts))

    def __contains__(self, key: Any) -> bool:
        parts: Any = self.module
        return key in parts

    def __len__(self) -> int:
        parts: Any = self.module
        return len(parts)

    def __bool__(self) -> bool:
        """Modules without a length are true, as any object is."""
        return bool(self.module)

    def __setattr__(self, name: str, value: Any) -> None:
        own = name in vars(self) or hasattr(SeenAsModule, name)
        if own or name == "module":
            super().__setattr__(name, value)
        else:
            # Where the module's forward pass finds it.
            setattr(self.module, name, value)


class SeenReplica(SeenAsModule):
    """The user's module, within DDP."""

    passed_by = "DDP's forward"
