"""``GradScaler``: no gradient that a script holds is scaled, whatever scales backward passes."""

from __future__ import annotations

import operator
import weakref
from typing import Any, ClassVar

import torch

from unipar.compat.adopted import AdoptedOptimizer
from unipar.compat.adopting import adoption
from unipar.compat.loss_scales import SCALERS, note_scaled
from unipar.compat.routed import engines_side, steps_alone
from unipar.engine import PrecisionPolicy
from unipar.errors import ConfigError


class ScaleInUse(float):
    """1, by which the losses of the script are scaled, compared as the scale that there is.

    Factors and divisors of losses and gradients are made of it. And what it was before an update
    is held against what it is after it, to see whether a step was left out.
    """

    scale: float

    @classmethod
    def of(cls, scale: float) -> ScaleInUse:
        """1, where the scale is this."""
        made = cls(1.0)
        made.scale = scale
        return made

    __hash__ = float.__hash__

    def __reduce__(self) -> Any:
        # Files of scripts are to hold nothing of unipar's.
        return float, (1.0,)


def _comparing(name: str) -> Any:
    compare = getattr(operator, name)

    def method(self: ScaleInUse, other: Any) -> Any:
        return compare(self.scale, other.scale if isinstance(other, ScaleInUse) else other)

    method.__name__, method.__doc__ = name, getattr(float, name).__doc__
    return method


for _name in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"):
    setattr(ScaleInUse, _name, _comparing(_name))


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
        # The scale since the last update, once get_scale() was called; whether losses were scaled
        # since.
        self._shown: float | None = None
        self._holds = False
        SCALERS.add(self)
        if self._enabled:
            # A scaler leaves out steps whose gradients are not finite, and so has the engine to.
            adoption.ask(on_nan="skip")

    def scale(self, outputs: Any) -> Any:
        """The losses as they are."""
        self._scaled = self._holds = self._enabled
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
        left_out = self._shown is not None and self._has_left_out()
        self._stepped.clear()
        self._holds = False
        if new_scale is not None and self._scale is None:
            self._init_scale = float(new_scale)
        elif new_scale is not None or self._per_optimizer_states:
            super().update(new_scale)
        if self._shown is not None:
            before, self._shown = self._shown, self._scale_now()
            if left_out and self._shown >= before:
                # Of several engines another has the lowest; or none scales.
                self._shown = before * self._backoff_factor

    def _has_left_out(self) -> bool:
        """Whether a step was left out since the last update. To look may wait for the device."""
        return any(one.step_was_skipped for one in self._stepped) or any(
            bool(found)
            for state in self._per_optimizer_states.values()
            for found in state["found_inf_per_device"].values()
        )

    def get_scale(self) -> float:
        """The scale since the last update; :class:`ScaleInUse` from ``scale(…)`` to ``update()``.

        Of several engines it is the lowest, and falls once a step of any was left out.
        """
        if not self._enabled:
            return 1.0
        if self._shown is None:
            self._shown = self._scale_now()
            if self._stepped and self._has_left_out():
                # An engine's has fallen as it stepped, and a script's is to fall with the update.
                self._shown /= self._backoff_factor
        return ScaleInUse.of(self._shown) if self._holds else self._shown

    def _scale_now(self) -> float:
        scalers = self._engines_scalers()
        return min((one.get_scale() for one in scalers), default=super().get_scale())

    def state_dict(self) -> dict[str, Any]:
        """torch's, of the engine that scales in its place; of several, the lowest scale."""
        if not self._enabled:
            return {}
        if scalers := self._engines_scalers():
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
        self._shown = None
        for policy in self._engines_policies():
            policy.scale_as(state_dict)

    def _engines_scalers(self) -> list[torch.amp.GradScaler]:
        return [policy.scaler for policy in self._engines_policies() if policy.scaler]

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
