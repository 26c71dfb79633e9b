"""Which GPU this is, and how many operations it does in a second at most."""

from __future__ import annotations

import platform
from datetime import datetime, timezone

import torch

import unipar
from unipar.launch.once import hardware

_PAGES = "https://www.nvidia.com/en-us/data-center"
PEAKS: dict[str, tuple[float, float | None, str]] = {
    "NVIDIA H100 80GB HBM3": (989.4, 1978.9, f"{_PAGES}/h100/"),
    "NVIDIA H100 PCIe": (756.0, 1513.0, f"{_PAGES}/h100/"),
    "NVIDIA H100 NVL": (835.0, 1671.0, f"{_PAGES}/h100/"),
    "NVIDIA H200": (989.4, 1978.9, f"{_PAGES}/h200/"),
    "NVIDIA A100-SXM4-40GB": (312.0, None, f"{_PAGES}/a100/"),
    "NVIDIA A100-SXM4-80GB": (312.0, None, f"{_PAGES}/a100/"),
    "NVIDIA A100 80GB PCIe": (312.0, None, f"{_PAGES}/a100/"),
    "NVIDIA L40S": (362.05, 733.0, f"{_PAGES}/l40s/"),
    "NVIDIA L4": (121.0, 242.5, f"{_PAGES}/l4/"),
}
"""By the name that the driver gives: dense TFLOP/s in bf16 and in fp8, and the maker's page. Where
a page gives only the rate with sparsity, half of it."""


def name(device: str) -> str:
    """Of the first GPU, or of what stands for it."""
    return torch.cuda.get_device_name(0) if device == "cuda" else device


def driver() -> str:
    """The driver's version; empty where ``nvidia-smi`` does not say."""
    told = hardware()
    return told[0].rpartition(", ")[2] if told and ", " in told[0] else ""


def peak(device: str, precision: str) -> tuple[float | None, str]:
    """Operations in a second at most, and where that is from; ``None`` for an unknown card."""
    bf16, fp8, source = PEAKS.get(name(device), (None, None, ""))
    found = fp8 if precision == "fp8" else bf16
    return (None if found is None else found * 1e12), source


def about(device: str, command: str, seconds: float) -> dict[str, str]:
    """GPU, driver, torch and the rest of the circumstances, for a record."""
    return {
        "about": (
            f"{datetime.now(timezone.utc):%Y-%m-%d}, `{command}`, {seconds / 60:.1f} minutes; "
            f"unipar {unipar.__version__}, Python {platform.python_version()}, {platform.system()}."
        ),
        "gpu": name(device),
        "driver": driver() if device == "cuda" else "",
        "cuda": torch.version.cuda or "",
        "torch": str(torch.__version__),
    }


def require() -> None:
    """Exit where there is no GPU, and say what is needed."""
    if not torch.cuda.is_available():
        raise SystemExit(
            f"There is no GPU here that torch {torch.__version__} sees (it is built for "
            f"{'CUDA ' + torch.version.cuda if torch.version.cuda else 'CPUs only'}). Run this on "
            "a machine with one NVIDIA GPU and a CUDA build of torch 2.8 to 2.15: docs/gpu.md."
        )
