"""How the scale of fp16 losses begins and changes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from unipar.utils.numbers import NUMBER, PositiveInt

# The scale is an fp32 tensor: 2^-126 to 2^127 are what that holds with all of its digits.
_Scale = Annotated[float, Field(ge=2.0**-126, le=2.0**127), NUMBER]


class LossScale(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """How the scale of fp16 losses begins and changes; the defaults are PyTorch's.

    With factors of 1 it never changes.
    """

    initial: _Scale = 65536.0
    """What losses are multiplied by at first, and gradients divided by."""
    growth_factor: Annotated[float, Field(ge=1, le=2.0**127), NUMBER] = 2.0
    """What it is multiplied by after `growth_interval` steps without an overflow."""
    backoff_factor: Annotated[float, Field(gt=0, le=1), NUMBER] = 0.5
    """What it is multiplied by after a step whose gradients have overflowed, which is skipped."""
    growth_interval: PositiveInt = 2000
    """Steps in a row without an overflow before it grows."""

    def scaler_state(self) -> dict[str, Any]:
        """The state of a ``torch.amp.GradScaler`` that begins so."""
        return {
            "scale": self.initial,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": 0,
        }
