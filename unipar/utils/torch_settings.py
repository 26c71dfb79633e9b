"""Settings of PyTorch that hold for a whole process, and have to hold in those that it starts."""

from __future__ import annotations

from typing import Any

import torch

from unipar.utils.torch_versions import precision_of_fp32, set_precision_of_fp32


def torch_settings() -> dict[str, Any]:
    """What they are in this process."""
    return {
        "default_dtype": torch.get_default_dtype(),
        "matmul_precision": _matmul_precision(),
        "fp32": precision_of_fp32(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "anomaly": torch.is_anomaly_enabled(),
        "anomaly_check_nan": torch.is_anomaly_check_nan_enabled(),
    }


def _matmul_precision() -> str | None:
    """``None`` where it is set by the names that torch has for it since 2.9."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def set_torch(settings: dict[str, Any]) -> None:
    """Set them as :func:`torch_settings` has found them elsewhere."""
    torch.set_default_dtype(settings["default_dtype"])
    if settings["matmul_precision"] not in (None, _matmul_precision()):
        torch.set_float32_matmul_precision(settings["matmul_precision"])
    set_precision_of_fp32(settings["fp32"])
    if settings["deterministic"]:
        torch.use_deterministic_algorithms(True, warn_only=settings["deterministic_warn_only"])
    torch.backends.cudnn.benchmark = settings["cudnn_benchmark"]
    torch.backends.cudnn.deterministic = settings["cudnn_deterministic"]
    if settings["anomaly"]:
        torch.autograd.set_detect_anomaly(True, settings["anomaly_check_nan"])
