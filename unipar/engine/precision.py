"""The precision policy: the part of a :class:`StepEngine` that applies half precision."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from unipar.engine.state import import_scaler
from unipar.errors import ConfigError
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
        as_asked: whether its scale is one that was asked for, or that of a checkpoint.
        may_leave_out: whether forward passes have no autocast but this policy's, if they have one.
    """

    may_leave_out: bool = True

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
        self.as_asked = False

    def forward(self) -> AbstractContextManager[Any]:
        """Surround a forward pass and the loss."""
        if not self.autocasts:
            return contextlib.nullcontext()
        return torch.autocast(self._device_type, self.dtype)

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Compute in the weights' dtype, where autocast alone makes that another."""
        before = self.autocasts, self.surrounds
        # A framework may ask from within its own forward pass, too.
        self.autocasts = self.surrounds = False
        try:
            yield
        finally:
            self.autocasts, self.surrounds = before

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Scale a loss for the backward pass."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def begin_scaling(self) -> None:
        """Scale from the next step on, also where it is not this policy that computes in fp16."""
        if self.scaler is None:
            self.scaler = GradScaler(self._device_type)

    def scale_as(self, state: dict[str, Any]) -> None:
        """Begin as a scaler that has such a state; there has to be one here."""
        assert self.scaler is not None
        self.as_asked = True
        self.scaler.load_state_dict(state)

    @property
    def current_scale(self) -> torch.Tensor:
        """The scale, a scalar on the device; there has to be a scaler."""
        scaler = self.scaler
        assert scaler is not None
        if scaler._scale is None:
            # It makes it of the first loss.
            scaler.scale(torch.zeros((), device=self._device_type))
        assert scaler._scale is not None
        return scaler._scale

    def note_overflow(self, found: torch.Tensor) -> None:
        """Lower the scale in the next step, if a gradient that no optimizer here has was too large.

        Args:
            found: scalar, above 0 if it was; the same on all ranks.
        """
        assert self.scaler is not None
        note_overflow(self.scaler, found)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the scale, and what it may grow by, around a step that goes on in another."""
        scaler = self.scaler
        if scaler is None:
            yield
            return
        held = [self.current_scale, scaler._growth_tracker]
        before = [None if one is None else one.clone() for one in held]
        yield
        for one, was in zip(held, before, strict=True):
            if one is not None and was is not None:
                one.copy_(was)

    def lower(self) -> None:
        """Lower the scale, as after a step that was left out."""
        if self.scaler is not None:
            self.note_overflow(torch.ones_like(self.current_scale))
            self.scaler.update()

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, before they are clipped."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        """Step, and return whether the weights changed (fp16 gradients may have overflowed)."""
        if self.scaler is None:
            optimizer.step()
            return True
        overflowed = has_overflowed(self.scaler, optimizer)
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
            self.as_asked |= "scaler" in source.extra


def has_overflowed(scaler: GradScaler, optimizer: Optimizer) -> bool:
    """Whether a gradient that a scaler has unscaled is not finite."""
    # As the scaler's own `step` finds it (torch 2.13, amp/grad_scaler.py), which does not say.
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
    return any(map(bool, found))


def note_overflow(scaler: GradScaler, found: torch.Tensor) -> None:
    """Tell a scaler of gradients that it has not seen, for its next update.

    Args:
        scaler: which has a scale.
        found: scalar on the device, above 0 if they were too large.
    """
    # As of one more optimizer (torch 2.8 to 2.13, amp/grad_scaler.py, update).
    seen = scaler._per_optimizer_states[id(note_overflow)]["found_inf_per_device"]
    seen[found.device] = found + seen[found.device] if found.device in seen else found


def share_scale(begun: Sequence[PrecisionPolicy], fresh: Sequence[PrecisionPolicy]) -> None:
    """Have the gradients of one backward pass be of one scale, by which several engines unscale.

    Each engine's scale changes as that engine steps. The lowest one is one that none overflows by.

    Args:
        begun: of engines that have gradients already.
        fresh: of engines that have none.

    Raises:
        ConfigError: those that there are have several scales.
    """
    if all(one.scaler is None for one in (*begun, *fresh)):
        return
    for one in fresh:
        one.begin_scaling()
    known = [None if one.scaler is None else one.current_scale for one in begun]
    scales = [one for one in known if one is not None]
    if len(scales) < len(known) or any(not torch.equal(one, scales[0]) for one in scales[1:]):
        raise ConfigError(
            "one loss trains several models here, which have gradients of losses before it, and "
            "these were scaled by other numbers, for an engine changes its scale for fp16 as it "
            "steps. Step by them, or clear them, before this backward pass; or add their losses "
            "to this one."
        )
    common = scales[0] if scales else torch.stack([one.current_scale for one in fresh]).amin()
    for one in fresh:
        one.current_scale.copy_(common)
