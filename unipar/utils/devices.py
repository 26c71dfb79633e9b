"""Which devices a run gets."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

import psutil
import torch

from unipar.errors import ConfigError

DeviceChoice = Literal["auto", "cpu", "cuda"]
_RANGE = re.compile(r"([1-9]\d{0,5}):([1-9]\d{0,5})?")


class DeviceRange(NamedTuple):
    """The numbers of processes that a run may have.

    Attributes:
        least: with fewer it ends.
        most: it never has more; ``None``: as many as there are devices.
    """

    least: int
    most: int | None

    def __str__(self) -> str:
        return f"{self.least}:{self.most or ''}"


def device_range(devices: object) -> DeviceRange | None:
    """``"2:8"`` or ``"2:"`` as a range; ``None`` for anything that is not written so.

    Raises:
        ConfigError: it is, and no number is in it.
    """
    found = _RANGE.fullmatch(devices) if isinstance(devices, str) else None
    if found is None:
        return None
    least, most = int(found[1]), int(found[2]) if found[2] else None
    if most is not None and most < least:
        raise ConfigError(
            f"devices='{devices}': the first number is the least and the second the most, such as "
            f"'{most}:{least}'."
        )
    return DeviceRange(least, most)


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


def most_devices(wanted: DeviceRange, device_type: str) -> int:
    """How many devices of this machine a run may have that has a range of them.

    Raises:
        ConfigError: there are fewer than the least, or a CPU is to say how many it has.
    """
    if device_type != "cuda":
        if wanted.most is None:
            raise ConfigError(
                f"devices='{wanted}' goes up to all devices, and a CPU has no number of them. Say "
                f"the most, too, such as devices='{wanted.least}:{2 * wanted.least}'."
            )
        return wanted.most
    present = torch.cuda.device_count()
    if present < wanted.least:
        raise ConfigError(
            f"devices='{wanted}' asks for {wanted.least} GPU(s) at least, and this machine has "
            f"{present}. Lower the first number."
        )
    return min(present, wanted.most or present)


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
