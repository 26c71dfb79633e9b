"""The model and the optimizer of an engine, as faces share them, in DeepSpeed's words."""

from __future__ import annotations

from typing import Any, ClassVar
from weakref import WeakSet

import torch

from unipar.compat.deepspeed_names import OPTIMIZER, refuse
from unipar.compat.models import Calls, PreparedModel, led_to
from unipar.compat.optimizers import PreparedOptimizer, zero_unused
from unipar.errors import ConfigError

_INITIALIZE = "engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, …)"
_CALLS = Calls(
    prepare="deepspeed.initialize",
    optimized=_INITIALIZE,
    backward="engine.backward(loss)",
    clip="gradient_clipping in the config",
    whole="engine.module_state_dict(), or engine.save_checkpoint(directory)",
    save="engine.save_checkpoint(directory)",
    load="engine.load_checkpoint(directory)",
    unwrap="engine.module",
)


class EngineModel(PreparedModel):
    """A model in the run's precision, whose outputs are what they are there."""

    face_calls: ClassVar[Calls] = _CALLS


class EngineOptimizer(PreparedOptimizer):
    """An optimizer that an engine steps, and nobody else."""

    calls: ClassVar[Calls] = _CALLS
    own_buffers: bool | None = True
    clears: bool = False
    _all: ClassVar[WeakSet[EngineOptimizer]] = WeakSet()

    def takes_up(self, model: PreparedModel, **asked: Any) -> None:
        super().takes_up(model, **asked)
        self._all.add(self)
        # DeepSpeed 0.19.8 does so in every stage (engine.py, _get_gradients_for_reduction).
        self.optimizer.register_step_pre_hook(zero_unused)

    def backward(self, loss: torch.Tensor, **how: Any) -> None:
        if len(self._all) > 1:
            led = led_to([loss])
            if any(other is not self and other.training in led for other in self._all):
                raise ConfigError(
                    "this loss goes through the model of another engine, too, which would have "
                    "its gradients beside those of its own loss. Freeze that model meanwhile, by "
                    "other.module.requires_grad_(False), and thaw it for its own loss; or put "
                    "both models into one nn.Module."
                )
        super().backward(loss, **how)

    @property
    def cur_scale(self) -> float:
        """What losses of fp16 are scaled by; else 1. To look may wait for the device.

        Raises:
            ConfigError: where it is set.
        """
        scaler = self.precision.scaler if self.precision is not None else None
        return 1.0 if scaler is None else scaler.get_scale()

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        why = OPTIMIZER.why_not("loss_scaler")
        raise ConfigError(f"engine.optimizer has no scale that can be set, as to {value}. {why}")

    loss_scale = cur_scale

    @property
    def overflow(self) -> bool:
        """Whether the last step was left out. To look may wait for the device."""
        return self.step_was_skipped

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name == "optimizer" or name.startswith("__"):
                raise
            why = OPTIMIZER.why_not(name)
            raise AttributeError(f"engine.optimizer has no {name} here. {why}") from error

    def take_step(self) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Reduce, clip, step and clear.

        Returns:
            The gradient's norm before it was clipped, if it is.
        """
        super().take_step()
        return None if self._last is None else self._last.grad_norm

    def step(self, closure: Any = None) -> None:
        refuse("optimizer.step()")

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.begun:
            raise ConfigError(
                "zero_grad() came in the midst of a step, after engine.backward(loss). What it "
                "drops there depends on ZeRO's stage. Leave it out: engine.step() clears."
            )
        self.drop()


class Unlogged:
    """DeepSpeed's timers and monitor, which note nothing here."""

    enabled = False

    def __call__(self, name: str) -> Unlogged:
        """The timer of a name."""
        return self

    def update_epoch_count(self) -> None:
        """Nothing."""

    def start(self) -> None:
        """Nothing."""

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def reset(self) -> None:
        """Nothing."""

    def has_timer(self, name: str) -> bool:
        """No timer has ever run."""
        return False

    def elapsed(self, reset: bool = True) -> float:
        """No time was noted."""
        return 0.0

    def log(self, names: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def write_events(self, event_list: Any) -> None:
        """Nothing."""
