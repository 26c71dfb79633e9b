"""``GradScaler``: in fp16 the engine scales, so a scaler only hands on what it is given."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from unipar.compat.adopting import adoption
from unipar.errors import ConfigError


class GradScaler:
    """torch's, over an engine that scales by itself. A loss comes back as it was.

    Args:
        device: the type of the device.
        args: as torch's.
        enabled: whether the script asks for scaling.
        kwargs: as torch's; the engine has a scale of its own.
    """

    def __init__(
        self, device: Any = "cuda", *args: Any, enabled: bool = True, **kwargs: Any
    ) -> None:
        there = str(device) != "cuda" or torch.cuda.is_available()
        self._enabled = enabled and there
        self._scaled = False
        _SCALERS.add(self)
        if self._enabled:
            # A scaler leaves out steps whose gradients are not finite, and so has the engine to.
            adoption.ask(on_nan="skip")

    def is_enabled(self) -> bool:
        """Whether the script asks for scaling."""
        return self._enabled

    def scale(self, outputs: Any) -> Any:
        """The losses as they are."""
        self._scaled = self._enabled
        return outputs

    def unscale_(self, optimizer: Any) -> None:
        """Nothing, but that gradients may be clipped now."""
        self._scaled = False

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's step."""
        self._scaled = False
        return optimizer.step(*args, **kwargs)

    def update(self, new_scale: Any = None) -> None:
        """Nothing."""

    def get_scale(self) -> float:
        """1, by which the losses of the script are scaled."""
        return 1.0

    def state_dict(self) -> dict[str, Any]:
        """What torch's has at first, with the scale that losses have: the engine keeps its own."""
        if not self._enabled:
            return {}
        # torch 2.13, torch/amp/grad_scaler.py.
        return {
            "scale": self.get_scale(), "growth_factor": 2.0, "backoff_factor": 0.5,
            "growth_interval": 2000, "_growth_tracker": 0,
        }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing."""


ShardedGradScaler = GradScaler
_SCALERS: weakref.WeakSet[GradScaler] = weakref.WeakSet()


def refuse_scaled() -> None:
    """Refuse to clip what torch would clip scaled.

    Raises:
        ConfigError: a loss was scaled, and gradients were not unscaled since.
    """
    if any(one._scaled for one in _SCALERS):  # pyright: ignore[reportPrivateUsage]
        raise ConfigError(
            "clip_grad_norm_ came before scaler.unscale_(optimizer), so PyTorch would clip scaled "
            "gradients, to a norm about 65536 times smaller. Call scaler.unscale_(optimizer) first."
        )
