"""Strategies that are wrong on purpose, each in a way that some framework or wrapper has been."""

from __future__ import annotations

import os
import unittest.mock
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from unipar.combined import optimizers_in
from unipar.data.batch import Batch, MicroBatch
from unipar.engine import DDPReducer, OptimizerStepper, StepEngine, scale_gradients
from unipar.loss import LossFn, LossSum
from unipar.objective import Objective
from unipar.state import EngineState, local_part
from unipar.strategy import EngineSpec, StepResult, Strategy
from unipar.world import World
from unipar_torch import context_parallel
from unipar_torch.context_parallel import ContextParallel
from unipar_torch.ddp import DDPOptions, DDPStrategy
from unipar_torch.expert_sharding import MeshesStepper
from unipar_torch.fsdp import FSDPOptions, FSDPStrategy
from unipar_torch.layer_cuts import Activations
from unipar_torch.mesh import MeshStrategy
from unipar_torch.mesh_options import MeshOptions

# -- wrong parts -----------------------------------------------------------------------------------


class ClipIgnored(OptimizerStepper):
    def clip(self, max_norm: float, factor: float = 1.0) -> torch.Tensor:
        return super().clip(float("inf"), factor)


class GradientsSummed(DDPReducer):
    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        super().backward(loss * self.world.size, last=last)


class UnusedUnnoticed(DDPReducer):
    def finish(self) -> None:
        pass


class NeverReduced(UnusedUnnoticed):
    def begin(self, *, whole_step: bool) -> None:
        super().begin(whole_step=whole_step)
        self.ddp.require_backward_grad_sync = False


class GradientsUnguarded(DDPReducer):
    watches_gradients = False


class StrayGradients(DDPReducer):
    """Adds to a step what another model's has left."""

    def begin(self, *, whole_step: bool) -> None:
        super().begin(whole_step=whole_step)
        self._strays = [parameter.grad for parameter in self.module.parameters()]

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        super().backward(loss, last=last)
        for parameter, stray in zip(self.module.parameters(), self._strays, strict=True):
            if stray is not None and parameter.grad is not None:
                parameter.grad.add_(stray)


class TensorsSplit(OptimizerStepper):
    """Gives the optimizer flat halves of tensors, as ZeRO does with ranks' shares of them."""

    def update(self) -> bool:
        for group in self.optimizer.param_groups:
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
        self.optimizer.step()
        return True


class FirstOptimizerStepped(OptimizerStepper):
    def update(self) -> bool:
        return self.precision.step(next(iter(optimizers_in(self.optimizer).values())))


class PartsUnsaved(StepEngine):
    """What :class:`TensorsSplit` leaves can be saved."""

    def export_state(self) -> EngineState:
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            group["params"] = group.pop("whole")
        self.optimizer.state.clear()
        return super().export_state()


# -- wrong steps -----------------------------------------------------------------------------------


class ReducedAfterForward(StepEngine):
    """Each forward pass of a user's loop makes the next backward pass, and only that, reduce."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.loop_model = self.model
        return super().__call__(*args, **kwargs)


class WrapperShown(StepEngine):
    """Gives loss functions what the framework has made of the user's module."""

    def train_step(self, batch: Batch, loss_fn: LossFn) -> StepResult:
        assert isinstance(self.reducer, DDPReducer)
        self.model = self.reducer.ddp
        return super().train_step(batch, loss_fn)


class ModesForgotten(StepEngine):
    """Has the whole model in training mode after an evaluation."""

    def eval_batch(self, batch: Batch, loss_fn: LossFn) -> LossSum:
        found = super().eval_batch(batch, loss_fn)
        self.module.train()
        return found


class InnerGradientTaken(StepEngine):
    """Takes the first gradient that goes through the model for that of the step."""

    def train_step(self, batch: Batch, loss_fn: LossFn) -> StepResult:
        def watched(model: Any, data: Any) -> Any:
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
                return loss_fn(model, data)
            finally:
                handle.remove()

        return super().train_step(batch, watched)


class WeightsGathered(StepEngine):
    """What a forward pass does to weights is done to copies, as where they are gathered for it."""

    def train_step(self, batch: Batch, loss_fn: LossFn) -> StepResult:
        def on_copies(model: Any, data: Any) -> Any:
            kept = [p.detach().clone() for p in self.module.parameters()]
            loss = loss_fn(model, data)
            for parameter, weights in zip(self.module.parameters(), kept, strict=True):
                parameter.data.copy_(weights)
            return loss

        return super().train_step(batch, on_copies)


class LastBatchDropped(StepEngine):
    def train_step(self, batch: Batch, loss_fn: LossFn) -> StepResult:
        if batch.global_num_samples < (self.spec.global_batch_size or 0):
            return StepResult(0.0, 0, 0.0, skipped=True)
        return super().train_step(batch, loss_fn)


class SchedulerPerRank(StepEngine):
    def train_step(self, batch: Batch, loss_fn: LossFn) -> StepResult:
        result = super().train_step(batch, loss_fn)
        for _ in range(self.world.size - 1):
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        return result


class PlateauStepped(StepEngine):
    def train_step(self, batch: Batch, loss_fn: LossFn) -> StepResult:
        result = super().train_step(batch, loss_fn)
        scheduler: Any = self.lr_scheduler
        scheduler.step(float(self.num_steps))
        return result


class MeanOfMeans(StepEngine):
    def train_step(self, batch: Batch, loss_fn: LossFn) -> StepResult:
        def mean(model: Any, data: Any) -> LossSum | torch.Tensor:
            loss = loss_fn(model, data)
            if not isinstance(loss, LossSum):
                return loss
            return loss.total / torch.as_tensor(loss.count).clamp(min=1)

        return super().train_step(batch, mean)


class RanksAlike(StepEngine):
    """Takes the mean of ranks' means, as what averages gradients does."""

    def train_step(self, batch: Batch, loss_fn: LossFn) -> StepResult:
        each: Any = batch.global_num_samples / self.world.size / len(batch)
        alike = [replace(m, num_samples=each) for m in batch]
        return super().train_step(replace(batch, microbatches=tuple(alike)), loss_fn)


class PaddingEvaluated(StepEngine):
    def eval_batch(self, batch: Batch, loss_fn: LossFn) -> LossSum:
        counted = [replace(m, num_samples=len(m.data["index"])) for m in batch.microbatches]
        return super().eval_batch(replace(batch, microbatches=tuple(counted)), loss_fn)


class Undetermined(StepEngine):
    def train_step(self, batch: Batch, loss_fn: LossFn) -> StepResult:
        result = super().train_step(batch, loss_fn)
        seed = self.world.broadcast(int.from_bytes(os.urandom(4), "big"))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.mul_(1 + 2e-7 * torch.rand(parameter.shape, generator=generator))
        return result


class NanSteppedOnOneRank(StepEngine):
    def train_step(self, batch: Batch, loss_fn: LossFn) -> StepResult:
        result = super().train_step(batch, loss_fn)
        if result.skipped and self.lr_scheduler is not None:
            self.lr_scheduler.step()
        return result


class MomentsForgotten(StepEngine):
    def import_state(self, source: Any, *, optimizer: bool = True) -> None:
        super().import_state(source, optimizer=optimizer)
        assert self.optimizer is not None
        self.optimizer.state.clear()


class EarlyOptimizerStrategy(FSDPStrategy):
    def prepare(self, spec: EngineSpec, world: World) -> StepEngine:
        assert isinstance(spec.model, nn.Module)
        assert spec.optimizer is not None
        early = spec.optimizer(list(spec.model.named_parameters()))
        engine = super().prepare(spec, world)
        # It holds parameters that no module has any more.
        assert isinstance(engine.stepper, OptimizerStepper)
        engine.stepper.optimizer = early
        return engine


class PrecisionIgnored(DDPStrategy):
    def prepare(self, spec: EngineSpec, world: World) -> StepEngine:
        return super().prepare(replace(spec, precision="fp32"), world)


class ShardingPretended(DDPStrategy):
    def capabilities(self) -> Any:
        return replace(super().capabilities(), sharded=frozenset({"parameters"}))


def with_classes(**classes: type) -> Callable[[], Strategy]:
    """A maker of ``ddp`` whose engines are made of parts of these classes.

    Args:
        classes: of the ``engine``, its ``reducer``, its ``stepper``.
    """

    class Broken(DDPStrategy):
        def prepare(self, spec: EngineSpec, world: World) -> StepEngine:
            engine = super().prepare(spec, world)
            for part, its_class in classes.items():
                (engine if part == "engine" else getattr(engine, part)).__class__ = its_class
            return engine

    return lambda: Broken(DDPOptions.model_validate({}))


# -- layers divided wrongly ------------------------------------------------------------------------


class NormOverRanks(MeshesStepper):
    """Counts what every rank has once for each of them."""

    def clip(self, max_norm: float, factor: float = 1.0) -> torch.Tensor:
        scale_gradients(self.parameters, factor)
        gradients: list[Any] = [p.grad for p in self.parameters if p.grad is not None]
        parts = [local_part(gradient) for gradient in gradients]
        square = torch.stack([part.square().sum() for part in parts]).sum()
        torch.distributed.all_reduce(square)
        norm = square.sqrt()
        if max_norm != float("inf"):
            nn.utils.clip_grads_with_norm_(self.parameters, max_norm, norm, foreach=False)
        return norm


class LossOfEveryRank(StepEngine):
    """Adds up the loss of each rank of a replica."""

    def train_step(self, batch: Batch, loss_fn: LossFn) -> StepResult:
        self.world._leads = True
        return super().train_step(batch, loss_fn)


class NormOverRanksStrategy(MeshStrategy):
    def prepare(self, spec: EngineSpec, world: World) -> StepEngine:
        engine = super().prepare(spec, world)
        assert engine.stepper is not None
        engine.stepper.__class__ = NormOverRanks
        return engine


class LossOfEveryRankStrategy(MeshStrategy):
    def prepare(self, spec: EngineSpec, world: World) -> StepEngine:
        engine = super().prepare(spec, world)
        engine.__class__ = LossOfEveryRank
        return engine


class SumForgottenStrategy(MeshStrategy):
    """Leaves out the sum after layers that are divided by rows, and what would find that out."""

    def prepare(self, spec: EngineSpec, world: World) -> StepEngine:
        from unipar_torch import tensor_parallel

        class Forgetting(Activations):
            def leave(self, part: torch.Tensor) -> torch.Tensor:
                return part

        patched = {"Activations": Forgetting, "check_in_first_pass": lambda *args: []}
        with unittest.mock.patch.multiple(tensor_parallel, **patched):
            return super().prepare(spec, world)


class GradientSumForgottenStrategy(MeshStrategy):
    """Leaves out the sum of gradients before layers that are divided by columns."""

    def prepare(self, spec: EngineSpec, world: World) -> StepEngine:
        from unipar_torch import tensor_parallel

        class Forgetting(Activations):
            def enter(self, x: torch.Tensor) -> torch.Tensor:
                return x

        patched = {"Activations": Forgetting, "check_in_first_pass": lambda *args: []}
        with unittest.mock.patch.multiple(tensor_parallel, **patched):
            return super().prepare(spec, world)


class RouterLossPerRank(StepEngine):
    """Counts a router's loss once for each rank that tokens come from."""

    def train_step(self, batch: Batch, loss_fn: LossFn) -> StepResult:
        def counted(model: Any, data: Any) -> Any:
            def count(_: nn.Module, args: Any, output: Any) -> None:
                output["router"].register_hook(lambda gradient: gradient * self.world.size)

            handle = self.module.register_forward_hook(count)
            try:
                return loss_fn(model, data)
            finally:
                handle.remove()

        return super().train_step(batch, counted)


class RouterLossPerRankStrategy(MeshStrategy):
    def prepare(self, spec: EngineSpec, world: World) -> StepEngine:
        engine = super().prepare(spec, world)
        engine.__class__ = RouterLossPerRank
        return engine


def dividing_experts(strategy: type[MeshStrategy]) -> Callable[[], Strategy]:
    """A maker of ``mesh`` whose two ranks divide experts, broken in one way."""
    return lambda: strategy(MeshOptions(ep=2))


class LastMicrobatchDroppedStrategy(MeshStrategy):
    """A pipeline that runs no more than the micro-batches that it has begun with in full."""

    def prepare(self, spec: EngineSpec, world: World) -> StepEngine:
        engine = super().prepare(spec, world)
        assert engine._pipeline is not None
        schedule: Any = engine._pipeline.schedule
        run = schedule.run
        schedule.run = lambda calls, *, training: run(calls[:-1] or calls, training=training)
        return engine


def staged() -> Strategy:
    return LastMicrobatchDroppedStrategy(MeshOptions(pp=2))


def dividing(strategy: type[MeshStrategy]) -> Callable[[], Strategy]:
    """A maker of ``mesh`` whose two ranks divide layers, broken in one way."""
    return lambda: strategy(MeshOptions(tp=2))


# -- sequences divided wrongly ---------------------------------------------------------------------


class Unchecked(ContextParallel):
    """Does not look at what comes of it."""

    def _check(self, *args: Any, **kwargs: Any) -> None:
        pass


class Unshifted(Unchecked):
    """Lets a model shift the labels of its part."""

    def dividing(self, model: nn.Module, microbatch: MicroBatch, loss_fn: Any) -> Any:
        if isinstance(loss_fn, Objective):
            loss_fn = replace(loss_fn, shifts_labels=False)
        return super().dividing(model, microbatch, loss_fn)


class OwnAttentionOnly(Unchecked):
    """Lets attention see the part of its own rank."""

    def _attention(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        return original(*args, **kwargs)


def dividing_sequences(wrong: type[ContextParallel]) -> Callable[[], Strategy]:
    """A maker of ``mesh`` whose two ranks divide sequences, broken in one way."""

    class Broken(MeshStrategy):
        def prepare(self, spec: EngineSpec, world: World) -> StepEngine:
            with unittest.mock.patch.object(context_parallel, "ContextParallel", wrong):
                return super().prepare(spec, world)

    return lambda: Broken(MeshOptions(cp=2))


def early_optimizer() -> Strategy:
    return EarlyOptimizerStrategy(FSDPOptions.model_validate({}))


def precision_ignored() -> Strategy:
    return PrecisionIgnored(DDPOptions.model_validate({}))


def sharding_pretended() -> Strategy:
    return ShardingPretended(DDPOptions.model_validate({}))
