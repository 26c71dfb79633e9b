"""``GradScaler``: no gradient that a script holds is scaled, whatever scales backward passes."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from unipar.compat.adopting import adoption
from unipar.compat.loss_scales import SCALERS, note_scaled
from unipar.compat.routed import steps_alone
from unipar.errors import ConfigError


class GradScaler(torch.amp.GradScaler):
    """torch's, which hands on the losses that it is given, and notes that they are to be scaled.

    An engine scales and unscales by itself in fp16, beginning as this one would. Where none does,
    the backward pass itself is scaled by this one's scale, and leaves gradients that are not. What
    an optimizer steps that no engine has is looked at alone: a step by what is not finite is left
    out, and lowers the scale.

    Args:
        args: as torch's: the type of the device, which ``torch.cuda.amp`` leaves out, and of how
            the scale changes.
        kwargs: likewise.
    """

    _ORDER: ClassVar = (
        "init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled",
    )  # fmt: skip

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        device = kwargs.pop("device", "cuda")
        if args and isinstance(args[0], (str, torch.device)):
            device, args = args[0], args[1:]
        given = {**dict(zip(self._ORDER, args, strict=False)), **kwargs}
        # Of FSDP's, over which it looks for overflows. Ranks train alike what no engine trains.
        given.pop("process_group", None)
        there = str(device) != "cuda" or torch.cuda.is_available()
        super().__init__(str(device), **{**given, "enabled": given.get("enabled", True) and there})
        self._scaled = self._handed_on = False
        SCALERS.add(self)
        if self._enabled:
            # A scaler leaves out steps whose gradients are not finite, and so has the engine to.
            adoption.ask(on_nan="skip")

    def scale(self, outputs: Any) -> Any:
        """The losses as they are."""
        self._scaled = self._enabled
        if self._enabled:
            note_scaled(outputs, self)
        return outputs

    def scale_of(self, loss: torch.Tensor) -> torch.Tensor:
        """By what a backward pass of a loss is scaled that no engine makes."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(loss.device)
        assert self._scale is not None
        return self._scale

    def as_engines_begin(self) -> dict[str, Any]:
        """The state in which engines begin that scale in its place: its own scale and factors."""
        self._handed_on = True
        return {**super().state_dict(), "scale": super().get_scale()}

    def unscale_(self, optimizer: Any) -> None:
        """Look whether gradients are finite that no engine steps by; they may be clipped now."""
        self._scaled = False
        if self._enabled and steps_alone(optimizer):
            self.scale_of(next(p for group in optimizer.param_groups for p in group["params"]))
            super().unscale_(optimizer)

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> Any:
        one = torch.ones_like(inv_scale)
        return super()._unscale_grads_(optimizer, one, found_inf, allow_fp16)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's step; none by gradients that are not finite."""
        self._scaled = False
        if not self._enabled or not steps_alone(optimizer):
            return optimizer.step(*args, **kwargs)
        if not self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]:
            # Before torch's, which has fused optimizers divide by the scale where it was not.
            self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: Any = None) -> None:
        """torch's, where an optimizer has stepped that no engine has.

        Raises:
            ConfigError: it is given a scale, and engines scale by their own.
        """
        if not self._enabled:
            return
        if new_scale is not None and self._handed_on:
            raise ConfigError(
                f"scaler.update({new_scale}): an engine scales in this GradScaler's place since "
                "its first backward pass, by a scale of its own that adapts. Leave the new scale "
                "out, and give GradScaler(init_scale=…, growth_interval=…) how it begins and "
                "grows; or train in bf16, which needs none."
            )
        if new_scale is not None and self._scale is None:
            self._init_scale = float(new_scale)
        elif new_scale is not None or self._per_optimizer_states:
            super().update(new_scale)

    def get_scale(self) -> float:
        """1, by which the losses of the script are scaled."""
        return 1.0

    def state_dict(self) -> dict[str, Any]:
        """torch's; 1 is the scale of one that has scaled nothing: the engine keeps its own."""
        state = super().state_dict()
        if self._enabled and self._scale is not None:
            state["scale"] = self._scale.item()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch's, but for the scale of one that had scaled nothing."""
        if not self._enabled or not state_dict:
            return
        own, scale = super().get_scale(), state_dict["scale"]
        super().load_state_dict({**state_dict, "scale": own if scale == 1.0 else scale})


class ShardedGradScaler(GradScaler):
    """FSDP's, which has the same in another order."""

    # torch 2.13, distributed/fsdp/sharded_grad_scaler.py.
    _ORDER: ClassVar = (
        "init_scale", "backoff_factor", "growth_factor", "growth_interval", "enabled",
    )  # fmt: skip


def refuse_scaled() -> None:
    """Refuse to clip what torch would clip scaled.

    Raises:
        ConfigError: a loss was scaled, and gradients were not unscaled since.
    """
    if any(one._scaled for one in SCALERS):
        raise ConfigError(
            "clip_grad_norm_ came before scaler.unscale_(optimizer), so PyTorch would clip scaled "
            "gradients, to a norm about 65536 times smaller. Call scaler.unscale_(optimizer) first."
        )
