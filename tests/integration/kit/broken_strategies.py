"""Strategies that are wrong on purpose, each in a way that some framework or wrapper has been."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from unipar.batch import Batch, MicroBatch
from unipar.combined import optimizers_in
from unipar.loss import LossFn, LossSum
from unipar.state import EngineState
from unipar.strategy import EngineSpec, StepResult, Strategy
from unipar.world import World
from unipar_torch.ddp import DDPEngine, DDPOptions, DDPStrategy
from unipar_torch.fsdp import FSDPOptions, FSDPStrategy
from unipar_torch.sharding import FSDPEngine


class ClipIgnored(DDPEngine):
    def _gradient_norm(self, max_norm: float) -> float:
        return super()._gradient_norm(float("inf"))


class GradientsSummed(DDPEngine):
    def _backward(self, loss: torch.Tensor) -> None:
        super()._backward(loss * self.world.size)


class NeverReduced(DDPEngine):
    def train_step(self, batch: Batch, loss_fn: LossFn) -> StepResult:
        assert self._reducer is not None
        with self._reducer.ddp.no_sync():
            return super().train_step(batch, loss_fn)

    def _finish_gradients(self) -> None:
        pass


class UnusedUnnoticed(DDPEngine):
    def _finish_gradients(self) -> None:
        pass


class ReducedAfterForward(DDPEngine):
    """Each forward pass of a user's loop makes the next backward pass, and only that, reduce."""

    def _call_by_hand(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def _finish_gradients(self) -> None:
        pass


class InnerGradientTaken(DDPEngine):
    """Takes the first gradient that goes through the model for that of the step."""

    def _loss(
        self, model: nn.Module, microbatch: MicroBatch, loss_fn: LossFn, *, training: bool
    ) -> Any:
        passes = 0

        def once(grad: torch.Tensor) -> torch.Tensor:
            nonlocal passes
            passes += 1
            return grad if passes == 1 else torch.zeros_like(grad)

        def watch(_: nn.Module, args: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(once)

        handle = self.module.register_forward_hook(watch)
        try:
            return super()._loss(model, microbatch, loss_fn, training=training)
        finally:
            handle.remove()


class WeightsGathered(DDPEngine):
    """What a forward pass does to weights is done to copies, as where they are gathered for it."""

    def _loss(
        self, model: nn.Module, microbatch: MicroBatch, loss_fn: LossFn, *, training: bool
    ) -> Any:
        kept = [p.detach().clone() for p in self._all_parameters]
        loss = super()._loss(model, microbatch, loss_fn, training=training)
        for parameter, weights in zip(self._all_parameters, kept, strict=True):
            parameter.data.copy_(weights)
        return loss


class GradientsUnguarded(DDPEngine):
    def _check_left_alone(self) -> None:
        pass


class LastBatchDropped(DDPEngine):
    def train_step(self, batch: Batch, loss_fn: LossFn) -> StepResult:
        if batch.global_num_samples < (self.spec.global_batch_size or 0):
            return StepResult(0.0, 0, 0.0, skipped=True)
        return super().train_step(batch, loss_fn)


class SchedulerPerRank(DDPEngine):
    def train_step(self, batch: Batch, loss_fn: LossFn) -> StepResult:
        result = super().train_step(batch, loss_fn)
        for _ in range(self.world.size - 1):
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        return result


class PlateauStepped(DDPEngine):
    def _step_scheduler(self) -> None:
        scheduler: Any = self.lr_scheduler
        scheduler.step(float(self.num_steps))


class MeanOfMeans(DDPEngine):
    def train_step(self, batch: Batch, loss_fn: LossFn) -> StepResult:
        def mean(model: Any, data: Any) -> LossSum | torch.Tensor:
            loss = loss_fn(model, data)
            if not isinstance(loss, LossSum):
                return loss
            return loss.total / torch.as_tensor(loss.count).clamp(min=1)

        return super().train_step(batch, mean)


class PaddingEvaluated(DDPEngine):
    def eval_step(self, microbatch: MicroBatch, loss_fn: LossFn) -> LossSum:
        counted = replace(microbatch, num_samples=len(microbatch.data["index"]))
        return super().eval_step(counted, loss_fn)


class Undetermined(DDPEngine):
    def train_step(self, batch: Batch, loss_fn: LossFn) -> StepResult:
        result = super().train_step(batch, loss_fn)
        seed = self.world.broadcast(int.from_bytes(os.urandom(4), "big"))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.mul_(1 + 2e-7 * torch.rand(parameter.shape, generator=generator))
        return result


class NanSteppedOnOneRank(DDPEngine):
    def _not_finite(self, what: str, loss: float, count: float) -> StepResult:
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        return super()._not_finite(what, loss, count)


class StrayGradients(DDPEngine):
    def _add(self, *args: Any, **kwargs: Any) -> None:
        strays = [p.grad for p in self._parameters]
        super()._add(*args, **kwargs)
        for parameter, stray in zip(self._parameters, strays, strict=True):
            if stray is not None and parameter.grad is not None:
                parameter.grad.add_(stray)


class MomentsForgotten(DDPEngine):
    def import_state(self, source: Any, *, optimizer: bool = True) -> None:
        super().import_state(source, optimizer=optimizer)
        assert self.optimizer is not None
        self.optimizer.state.clear()


class TensorsSplit(DDPEngine):
    """Gives the optimizer flat halves of tensors, as ZeRO does with ranks' shares of them."""

    def _step_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        for group in optimizer.param_groups:
            if "whole" not in group:
                group["whole"] = group["params"]
                group["params"] = [
                    nn.Parameter(half)
                    for p in group["whole"]
                    for half in p.detach().flatten().tensor_split(2)
                ]
            halves = iter(group["params"])
            for p in group["whole"]:
                for half in p.grad.flatten().tensor_split(2):
                    next(halves).grad = half
        optimizer.step()
        return True

    def export_state(self) -> EngineState:
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            group["params"] = group.pop("whole")
        self.optimizer.state.clear()
        return super().export_state()


class FirstOptimizerStepped(DDPEngine):
    def _step_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        return super()._step_optimizer(next(iter(optimizers_in(optimizer).values())))


class EarlyOptimizer(FSDPEngine):
    def export_state(self) -> EngineState:
        # Its optimizer holds parameters that no module has any more.
        optimizer, self.optimizer = self.optimizer, None
        try:
            return super().export_state()
        finally:
            self.optimizer = optimizer


class EarlyOptimizerStrategy(FSDPStrategy):
    def prepare(self, spec: EngineSpec, world: World) -> FSDPEngine:
        assert isinstance(spec.model, nn.Module)
        assert spec.optimizer is not None
        early = spec.optimizer(list(spec.model.named_parameters()))

        def built_before(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
            return early

        engine = super().prepare(replace(spec, optimizer=built_before), world)
        engine.__class__ = EarlyOptimizer
        return engine


class PrecisionIgnored(DDPStrategy):
    def prepare(self, spec: EngineSpec, world: World) -> DDPEngine:
        return super().prepare(replace(spec, precision="fp32"), world)


class ShardingPretended(DDPStrategy):
    def capabilities(self) -> Any:
        return replace(super().capabilities(), sharded=frozenset({"parameters"}))


def with_engine(engine_type: type[DDPEngine]) -> Callable[[], Strategy]:
    """A maker of ``ddp`` whose engines are of that type."""

    class Broken(DDPStrategy):
        def prepare(self, spec: EngineSpec, world: World) -> DDPEngine:
            engine = super().prepare(spec, world)
            engine.__class__ = engine_type
            return engine

    return lambda: Broken(DDPOptions.model_validate({}))


def early_optimizer() -> Strategy:
    return EarlyOptimizerStrategy(FSDPOptions.model_validate({}))


def precision_ignored() -> Strategy:
    return PrecisionIgnored(DDPOptions.model_validate({}))


def sharding_pretended() -> Strategy:
    return ShardingPretended(DDPOptions.model_validate({}))
