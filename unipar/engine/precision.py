"""The precision policy: the part of a :class:`StepEngine` that applies half precision."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from unipar.engine.state import import_scaler
from unipar.state import StateSource
from unipar.strategy import Precision

COMPUTE_DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    # All but matrix products of linear layers; see float8.py.
    "fp8": torch.bfloat16,
}


def keep_scale_on_host(scaler: GradScaler) -> None:
    """Keep a loss scaler's scale where gradients are that have been offloaded.

    Torch copies a scale that is on a GPU to gradients on the host in each step, and does not wait
    for the copy, so that they are divided by whatever the memory held before (torch 2.8 to 2.13,
    amp/grad_scaler.py, ``_MultiDeviceReplicator``).

    Args:
        scaler: not used yet, for it keeps its scale on the device of what it scales first.
    """
    # Not on what a script has made torch's default device.
    scaler.scale(torch.ones((), device="cpu"))


class PrecisionPolicy:
    """Autocast around forward passes, and in fp16 a scale of the loss.

    Args:
        name: as a user writes it.
        device: where the model computes.
        autocast: whether half precision is autocast's; ``False`` where the weights that compute
            are rounded themselves.
        scaler: of the loss, for a framework that needs its own; left out: PyTorch's in fp16.

    Attributes:
        dtype: what the model computes in.
        autocasts: whether forward passes run under autocast.
        surrounds: whether :meth:`forward` gives anything but a context that does nothing.
        scaler: of the loss; ``None``: it is not scaled.
    """

    def __init__(
        self,
        name: Precision,
        device: torch.device,
        *,
        autocast: bool = True,
        scaler: GradScaler | None = None,
    ) -> None:
        self.dtype = COMPUTE_DTYPES[name]
        self.autocasts = autocast and self.dtype is not torch.float32
        # Asked in each pass; a policy of another kind may put something of its own around it.
        self.surrounds = self.autocasts or type(self).forward is not PrecisionPolicy.forward
        self._device_type = device.type
        if self.dtype is torch.float16:
            scaler = GradScaler(device.type) if scaler is None else scaler
        self.scaler = scaler

    def forward(self) -> AbstractContextManager[Any]:
        """Surround a forward pass and the loss."""
        if not self.autocasts:
            return contextlib.nullcontext()
        return torch.autocast(self._device_type, self.dtype)

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Compute in the weights' dtype, where autocast alone makes that another."""
        before, self.surrounds = self.surrounds, False
        try:
            yield
        finally:
            self.surrounds = before

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Scale a loss for the backward pass."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, before they are clipped."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        """Step, and return whether the weights changed (fp16 gradients may have overflowed)."""
        if self.scaler is None:
            optimizer.step()
            return True
        # As the scaler's own `step` finds it (torch 2.13, amp/grad_scaler.py), which does not say.
        state = self.scaler._per_optimizer_states[id(optimizer)]
        overflowed = False
        for found in state["found_inf_per_device"].values():
            overflowed |= bool(found)
        if not overflowed:
            optimizer.step()
        self.scaler.update()
        return not overflowed

    def export_state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it, as plain values."""
        return {} if self.scaler is None else {"scaler": self.scaler.state_dict()}

    def import_state(self, source: StateSource) -> None:
        """Take over the stored scale, if there is one.

        Raises:
            CheckpointError: it is no state that a gradient scaler can be in.
        """
        if self.scaler is not None:
            import_scaler(self.scaler, source)
