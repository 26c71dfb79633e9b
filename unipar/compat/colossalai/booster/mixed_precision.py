"""What a ``Booster`` may be given as ``mixed_precision``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from unipar.compat.colossalai_names import PRECISIONS
from unipar.compat.runconfig import asked_scale
from unipar.errors import ConfigError
from unipar.strategy import Precision

__all__ = ["FP16TorchMixedPrecision", "MixedPrecision", "mixed_precision_factory"]


class MixedPrecision:
    """A precision to compute in, by autocast.

    Attributes:
        precision: of the run.
    """

    precision: ClassVar[Precision]

    def asked(self) -> dict[str, Any]:
        """What is asked of the run, where nothing else decides."""
        return {"precision": self.precision}


@dataclass
class FP16TorchMixedPrecision(MixedPrecision):
    """fp16, by a loss scale of these rules."""

    precision: ClassVar[Precision] = "fp16"

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def asked(self) -> dict[str, Any]:
        return super().asked() | asked_scale(
            initial=self.init_scale, growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor, growth_interval=self.growth_interval,
        )  # fmt: skip


class _BF16(MixedPrecision):
    # Colossal-AI's own is abstract in 0.5.0, and cannot be made.
    precision: ClassVar[Precision] = "bf16"


_NAMED = {"fp16": FP16TorchMixedPrecision, "bf16": _BF16}


def mixed_precision_factory(mixed_precision_type: str) -> MixedPrecision:
    """A precision by its name.

    Raises:
        ConfigError: it is not offered.
    """
    if mixed_precision_type not in _NAMED:
        raise ConfigError(
            f"mixed_precision={mixed_precision_type!r} is not offered here. Choose of "
            f"{', '.join(_NAMED)}, or set precision: fp8 in unipar.yaml."
        )
    return _NAMED[mixed_precision_type]()


__getattr__ = PRECISIONS.refusing(__name__)
