"""The norm of a gradient that a strategy clips when the optimizer steps, and not before."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from unipar.errors import ConfigError
from unipar.strategy import StepResult


class StepNorm(torch.Tensor):
    """A scalar that can be read once it is known: when the optimizer has stepped, if not before."""

    _result: StepResult | None = None
    _call: str

    @staticmethod
    def expected(device: torch.device, call: str) -> StepNorm:
        """One of a step that is to come, as a call has returned it.

        Args:
            device: where it is.
            call: what has returned it.
        """
        norm = torch.zeros((), device=device).as_subclass(StepNorm)
        norm._call = call
        return norm

    @property
    def settled(self) -> bool:
        """Whether it is known."""
        return self._result is not None

    def settle(self, result: StepResult) -> None:
        """Take over the result of the step."""
        self._result = result

    def value(self, device: torch.device) -> torch.Tensor:
        """The norm as a plain scalar tensor.

        Raises:
            ConfigError: the optimizer has not stepped.
        """
        if self._result is None:
            raise ConfigError(
                f"the norm that {self._call}(...) returned was read before "
                "optimizer.step(), in which strategies reduce and clip gradients. Read it after "
                "optimizer.step(). To leave out steps whose gradient is not finite, set "
                "on_nan: skip in unipar.yaml."
            )
        return torch.tensor(self._result.grad_norm, device=device)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def read(one: StepNorm) -> torch.Tensor:
            with torch._C.DisableTorchFunctionSubclass():
                device = one.device
            return one.value(device)

        plain = tree_map_only(cls, read, (args, kwargs or {}))
        return func(*plain[0], **plain[1])
