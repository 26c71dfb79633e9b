"""Small tensors on their way to the host and from it, while the device goes on."""

from __future__ import annotations

import functools
from typing import Any

import torch


class HostCopy:
    """A small tensor's values in host memory, waited for when they are read.

    On an accelerator the copy is queued when this is made. Reading waits for that copy, and not for
    what was queued on the device since. A tensor in host memory is read where it is.

    Args:
        tensor: what to copy; left as it is until it is read.
        work: the collective that fills it, if there is one; the device's other work does not wait
            for it.
    """

    __slots__ = ("_copied", "_read", "_values", "_work")

    def __init__(self, tensor: torch.Tensor, work: Any = None) -> None:
        self._values: torch.Tensor | None = tensor
        self._work, self._copied = work, None
        if not tensor.is_cpu:
            self._start(tensor, work)

    def _start(self, tensor: torch.Tensor, work: Any) -> None:
        device: Any = torch.get_device_module(tensor.device)
        own = device.current_stream(tensor.device)
        stream = own if work is None else _beside(tensor.device)
        self._values = values = torch.empty(
            tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True
        )
        with device.stream(stream):
            if work is not None:
                # Only this stream waits: the backward pass need not, whoever is the last rank.
                work.wait()
            values.copy_(tensor, non_blocking=True)
            # Or its memory might be used for something else by then.
            tensor.record_stream(stream)
            self._copied = device.Event()
            self._copied.record(stream)

    @property
    def waits(self) -> bool:
        """Whether reading may wait for a device: it has one's, and was not read yet."""
        return self._copied is not None

    def read(self) -> Any:
        """A number, or lists of them, as ``tensor.tolist()`` gives them."""
        if self._values is not None:
            if self._copied is not None:
                self._copied.synchronize()
            elif self._work is not None:
                self._work.wait()
            self._read = self._values.tolist()
            self._values = self._work = self._copied = None
        return self._read


@functools.cache
def _beside(device: torch.device) -> Any:
    """A stream for what the device's other work is not to wait for."""
    return torch.get_device_module(device).Stream(device)


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Send a small tensor to a device, from memory for which nobody waits.

    Args:
        values: in host memory.
        device: where it is wanted.
    """
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)
