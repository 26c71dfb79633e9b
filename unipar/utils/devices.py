"""Which devices a run gets."""

from __future__ import annotations

from typing import Literal

import psutil
import torch

from unipar.errors import ConfigError

DeviceChoice = Literal["auto", "cpu", "cuda"]


def resolve_device_type(device: DeviceChoice) -> str:
    """``"cuda"`` where there is a GPU and ``device`` allows it, else ``"cpu"``.

    Raises:
        ConfigError: a GPU was asked for and there is none.
    """
    if device == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if device == "cuda":
        built = torch.version.cuda
        raise ConfigError(
            "device='cuda' was asked for, and PyTorch sees no GPU "
            + (
                "(its build has CUDA: look at nvidia-smi and CUDA_VISIBLE_DEVICES)."
                if built
                else "(this build of PyTorch is for CPUs only: install a CUDA build)."
            )
            + " Use device='cpu' to run without one."
        )
    return "cpu"


def resolve_num_devices(devices: int | Literal["auto"], device_type: str) -> int:
    """Number of processes on this node: every GPU, or one process on a CPU, when ``"auto"``.

    Raises:
        ConfigError: more GPUs were asked for than there are, or fewer than one.
    """
    present = torch.cuda.device_count() if device_type == "cuda" else None
    if devices == "auto":
        return present or 1
    if devices < 1:
        raise ConfigError(f"devices={devices}: ask for at least 1.")
    if present is not None and devices > present:
        raise ConfigError(
            f"devices={devices} was asked for, and this machine has {present} GPU(s). "
            f"Use devices={present} or fewer, or num_nodes for several machines."
        )
    return devices


def device_memory(device_type: str) -> int:
    """Bytes of memory of one device; all of the host's for a CPU."""
    if device_type == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return psutil.virtual_memory().total


def peak_memory(device_type: str) -> int:
    """The most bytes this process has held: device memory, or resident memory on a CPU."""
    if device_type == "cuda":
        return torch.cuda.max_memory_allocated()
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
