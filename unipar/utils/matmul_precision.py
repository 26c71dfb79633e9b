"""How exactly matrix products of fp32 tensors are computed, for the length of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from unipar.errors import ConfigError

MatmulPrecision = Literal["highest", "high", "medium"]


def set_matmul_precision(precision: MatmulPrecision | None) -> Callable[[], None]:
    """Set it in this process by :func:`torch.set_float32_matmul_precision`.

    Args:
        precision: ``"highest"`` (fp32), ``"high"`` (TF32, or three products in bf16), ``"medium"``
            (bf16); ``None`` leaves it as it is.

    Returns:
        What sets it to what it was before.

    Raises:
        ConfigError: the process has set it by ``torch.backends.….fp32_precision``, which torch does
            not mix with this.
    """
    if precision is None:
        return lambda: None
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError as error:
        raise ConfigError(
            f"float32_matmul_precision={precision!r} was asked for, and this process has set "
            f"torch.backends.….fp32_precision, with which it cannot be mixed ({error}). Leave one "
            "of them out."
        ) from error
    torch.set_float32_matmul_precision(precision)
    return lambda: torch.set_float32_matmul_precision(before)
