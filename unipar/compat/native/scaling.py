"""``GradScaler``: no gradient that a script holds is scaled, whatever scales backward passes."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import torch

from unipar.compat.adopted import AdoptedOptimizer
from unipar.compat.adopting import adoption
from unipar.compat.loss_scales import SCALERS, note_scaled
from unipar.compat.routed import engines_side, steps_alone
from unipar.engine import PrecisionPolicy
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
        self._policies: list[weakref.ref[PrecisionPolicy]] = []
        self._stepped: list[AdoptedOptimizer] = []
        # What get_scale() gives from an update on; whether losses were scaled since; whether it was
        # called, and called between the two.
        self._shown, self._holds, self._asked, self._compares = 1.0, False, False, False
        SCALERS.add(self)
        if self._enabled:
            # A scaler leaves out steps whose gradients are not finite, and so has the engine to.
            adoption.ask(on_nan="skip")

    def scale(self, outputs: Any) -> Any:
        """The losses as they are."""
        self._scaled = self._enabled
        self._compares &= self._holds
        self._holds = True
        if self._enabled:
            note_scaled(outputs, self)
        return outputs

    def scale_of(self, loss: torch.Tensor) -> torch.Tensor:
        """By what a backward pass of a loss is scaled that no engine makes."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(loss.device)
        assert self._scale is not None
        return self._scale

    def hand_on(self, policy: PrecisionPolicy) -> None:
        """Have an engine scale in its place, beginning as it would unless that was restored."""
        self._handed_on = True
        if not policy.as_asked:
            policy.scale_as(self.state_dict())
        self._policies.append(weakref.ref(policy))

    def has_handed_on(self, policy: PrecisionPolicy) -> bool:
        """Whether an engine scales in its place."""
        return any(one() is policy for one in self._policies)

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
            given = optimizer.step(*args, **kwargs)
            # The first pass, which a closure may have made, gives it to an engine.
            if self._enabled and (adopted := engines_side(optimizer)) is not None:
                self._stepped.append(adopted)
            return given
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
        self._show_left_out()
        if new_scale is not None and self._scale is None:
            self._init_scale = float(new_scale)
        elif new_scale is not None or self._per_optimizer_states:
            super().update(new_scale)

    def _show_left_out(self) -> None:
        """Let what get_scale() gives fall if a step was left out since the last update."""
        # To look may wait for the device.
        left_out = self._asked and (
            any(one.step_was_skipped for one in self._stepped)
            or any(
                bool(found)
                for state in self._per_optimizer_states.values()
                for found in state["found_inf_per_device"].values()
            )
        )
        self._stepped.clear()
        self._shown = self._shown * self._backoff_factor if left_out else 1.0
        if left_out and not self._compares:
            adoption.tell(
                "a step was left out, so scaler.get_scale() gives less than before until the next "
                "scaler.scale(…), to be compared with. Losses are scaled by 1 here, which it gives "
                "otherwise; scaler.state_dict()['scale'] is the scale of the engine."
            )
        self._holds = self._compares = False

    def get_scale(self) -> float:
        """1, by which the losses of the script are scaled; less once a step was left out.

        It is less from ``update()`` to the next ``scale(…)``, and still less if the next step is
        left out, too: whichever of them a script has compared with before, it sees a fall.
        """
        self._asked = self._enabled
        self._compares |= self._holds
        return 1.0 if self._holds else self._shown

    def state_dict(self) -> dict[str, Any]:
        """torch's, of the engine that scales in its place; of several, the lowest scale."""
        if not self._enabled:
            return {}
        scalers = [policy.scaler for policy in self._engines_policies() if policy.scaler]
        if scalers:
            return min((one.state_dict() for one in scalers), key=lambda state: state["scale"])
        return {
            "scale": super().get_scale(),
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._get_growth_tracker(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch's, also into the engines that scale in its place."""
        if not self._enabled or not state_dict:
            return
        super().load_state_dict(state_dict)
        for policy in self._engines_policies():
            policy.scale_as(state_dict)

    def _engines_policies(self) -> list[PrecisionPolicy]:
        return [policy for ref in self._policies if (policy := ref()) is not None]

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._enabled:
            now = self.state_dict()
            state["_init_scale"] = now["scale"]
            state["_init_growth_tracker"] = now["_growth_tracker"]
        return {**state, "_policies": [], "_stepped": []}


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
