"""What a run trains on, under Fabric's names."""

from __future__ import annotations

import torch

from unipar.compat.fabric_names import ACCELERATORS


class Accelerator:
    """The kind of a device.

    Attributes:
        device: what the run's ``device`` says for it.
    """

    device = "auto"

    @staticmethod
    def auto_device_count() -> int:
        """As many processes as ``devices="auto"`` starts."""
        raise NotImplementedError

    @staticmethod
    def is_available() -> bool:
        """Whether there is one."""
        raise NotImplementedError


class CPUAccelerator(Accelerator):
    """The CPU."""

    device = "cpu"

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True


class CUDAAccelerator(Accelerator):
    """GPUs."""

    device = "cuda"

    @staticmethod
    def auto_device_count() -> int:
        return torch.cuda.device_count()

    @staticmethod
    def is_available() -> bool:
        return torch.cuda.is_available()


def find_usable_cuda_devices(num_devices: int = -1) -> list[int]:
    """The first GPUs.

    Raises:
        ValueError: there are fewer.
    """
    present = torch.cuda.device_count()
    if num_devices > present:
        raise ValueError(f"{num_devices} GPUs are asked for, and there are {present}.")
    return list(range(present if num_devices < 0 else num_devices))


__getattr__ = ACCELERATORS.refusing(__name__)
