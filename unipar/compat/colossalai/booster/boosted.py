"""What ``booster.boost`` gives back: a model and an optimizer that an engine trains."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from unipar.compat.colossalai.booster.plugin_base import Plugin
from unipar.compat.colossalai_names import refuse
from unipar.compat.models import Calls, PreparedModel
from unipar.compat.optimizers import PreparedOptimizer, training_in, zero_unused
from unipar.compat.run import current
from unipar.compat.several_optimizers import trained_by
from unipar.errors import ConfigError
from unipar.session import Session
from unipar.strategy import Engine

CALLS = Calls(
    prepare="booster.boost",
    optimized="model, optimizer, *_ = booster.boost(model, optimizer)",
    backward="booster.backward(loss, optimizer)",
    clip="optimizer.clip_grad_by_norm",
    whole="booster.save_model(model, path)",
    save="booster.save_optimizer(optimizer, path)",
    load="booster.load_optimizer(optimizer, path)",
    unwrap="model.unwrap()",
)


class BoostedModel(PreparedModel):
    """A model that is called as before; what it computes in half precision comes out so."""

    face_calls: ClassVar[Calls] = CALLS

    def __init__(self, module: nn.Module, session: Session, **settings: Any) -> None:
        super().__init__(module, session, **settings)
        self._unipar_class_name = type(self._unipar_base()).__name__

    def _unipar_base(self) -> Any:
        """What PEFT has adapted, or else the module itself."""
        found = getattr(self.module, "get_base_model", None)
        return self.module if found is None else found()

    def unwrap(self, unwrap_peft: bool = True) -> nn.Module:
        """The module itself, as the strategy has made it."""
        return self.module


class BoostedOptimizer(PreparedOptimizer):
    """An optimizer that its model's engine steps.

    Args:
        optimizer: the user's.
        session: the open one.
        plugin: of the ``Booster``.
        may_skip: whether a step may leave the weights as they were.

    Attributes:
        unsynced: whether a block under ``booster.no_sync`` is open.
        names: of the parameters, by their numbers in files.
    """

    calls: ClassVar[Calls] = CALLS

    def __init__(
        self,
        optimizer: Optimizer,
        session: Session,
        *,
        plugin: Plugin | None,
        may_skip: bool,
    ) -> None:
        super().__init__(optimizer, session, accumulating=lambda: False, may_skip=may_skip)
        self._plugin = plugin
        self.unsynced = False
        self.names: list[str] = []

    def takes_up(self, model: PreparedModel, **asked: Any) -> None:
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.names = [model.name_of(one) or "" for one in held]
        super().takes_up(model, **asked)
        if self._plugin is not None and self._plugin.zeros_unused:
            self.optimizer.register_step_pre_hook(zero_unused)

    @property
    def engine(self) -> Engine:
        """What steps it."""
        return self._known().engine

    @property
    def optim(self) -> Optimizer:
        """The user's."""
        return self.optimizer

    @property
    def parameters(self) -> list[torch.Tensor]:
        """All that it updates."""
        return [one for group in self.param_groups for one in group["params"]]

    def unwrap(self) -> Optimizer:
        """The user's."""
        return self.optimizer

    # -- a step ----------------------------------------------------------------------------------

    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        loss: torch.Tensor,
        inputs: Any = None,
        retain_graph: bool = False,
        *,
        beside: Sequence[BoostedOptimizer] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the gradient of a loss, as it is: a step is on the mean over ranks of their sum.

        Args:
            loss: scalar tensor.
            inputs: refused, as ``retain_graph`` and what else Colossal-AI hands to torch is.
            retain_graph: likewise.
            beside: other optimizers, whose models it trains, too; left out: as PyTorch would.
            kwargs: likewise.

        Raises:
            ConfigError: gradients of before would be added to this loss's, or it is asked for more
                than the gradient of a loss.
        """
        if inputs is not None or retain_graph or kwargs:
            refuse("Booster.backward(loss,optimizer,inputs=…)")
        if self._is_lost:
            raise ConfigError(
                "this loss's gradient would be added to that of the last step, which an engine has "
                "cleared. Call optimizer.zero_grad() after optimizer.step()."
            )
        if self.begun and self._plugin is not None and not self._plugin.accumulates:
            raise ConfigError(
                "a second backward pass came in one step, of which GeminiPlugin loses the first "
                "unless it is told: GeminiPlugin(enable_gradient_accumulation=True)."
            )
        if beside is None and self.training is not None:
            found = trained_by(loss, training_in(self._session, BoostedOptimizer), self.model)
            # A step on what was not cleared is refused, so nobody needs what would be added to it.
            for one in found:
                one.strayed |= one._is_lost and one is not self
            beside = [one for one in found if one is not self and not one._is_lost]
        super().backward(loss, likely_last=not self.unsynced, beside=beside or ())

    @property
    def _is_lost(self) -> bool:
        """Whether what the last step was by is not there, and the script has not cleared it."""
        return self.uncleared and not (self.same_parameters and self.sums_what_is_there)

    def take_step(self) -> None:
        if self.unsynced:
            raise ConfigError(
                "optimizer.step() came within booster.no_sync(...), where ranks would step on "
                "gradients of their own. Call it behind the block."
            )
        plugin = self._plugin
        if self._ends_own and self._session.world.size > 1 and not self.same_parameters:
            # Colossal-AI 0.5.0, low_level_optim.py: its groups have no gradients then.
            raise ConfigError(
                "the last backward pass of this step was within booster.no_sync(...): "
                f"{type(plugin).__name__} would step without what it has left. Have the last pass "
                "of each step out of the block; or use TorchDDPPlugin, under which each rank steps "
                "by its own gradients."
            )
        clips = self._session.capabilities.clipping
        if plugin is not None and plugin.measures_norm and not plugin.max_norm and clips:
            self._limit = math.inf
        super().take_step()

    def clip_grad_by_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Have the next step clip the gradient to a 2-norm.

        Returns:
            The norm before, a scalar tensor; it can be read once the optimizer has stepped.

        Raises:
            ConfigError: the strategy cannot clip so.
        """
        plugin = self._plugin
        if plugin is not None and plugin.clips_by_itself:
            raise ConfigError(
                f"{type(plugin).__name__} clips by itself, and clip_grad_by_norm clips nothing "
                f"under it. Pass max_norm to the plugin: {type(plugin).__name__}"
                f"(max_norm={max_norm})."
            )
        if norm_type != 2 or not max_norm > 0 or error_if_nonfinite:
            raise ConfigError(
                f"clip_grad_by_norm(max_norm={max_norm}, norm_type={norm_type}, "
                f"error_if_nonfinite={error_if_nonfinite}): strategies clip to a 2-norm above 0, "
                "and on_nan in unipar.yaml says what a step that is not finite does."
            )
        if not self._session.capabilities.clipping:
            raise ConfigError(
                f"strategy '{self._session.strategy.name}' cannot clip gradients. Leave "
                "clip_grad_by_norm out, or use another strategy."
            )
        return self.clip(max_norm, current.device())

    def get_grad_norm(self, norm_type: float = 2.0, **kwargs: Any) -> float | None:
        """The norm of the last step's gradient before it was clipped; ``None`` if it was not."""
        return None if self._last is None else self._last.grad_norm

    def __getattr__(self, name: str) -> Any:
        if name in ("backward_by_grad", "clip_grad_by_value", "scale_loss", "unscale_grad"):
            return functools.partial(_refuse, name)
        return super().__getattr__(name)


def _refuse(name: str, *args: Any, **kwargs: Any) -> None:
    refuse(f"optimizer.{name}")
