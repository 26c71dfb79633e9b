"""The training step over an ``nn.Module`` whose framework only reduces gradients."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unipar.batch import Batch, MicroBatch
from unipar.data.move import move_to
from unipar.engine.absent import AbsentGradient
from unipar.engine.inner import backward_pass, passes_begun
from unipar.engine.state import export_state, import_scaler, import_state
from unipar.errors import ConfigError, NonFiniteLossError, first_few
from unipar.launch.progress import mark
from unipar.loss import Loss, LossFn, LossSum, check_loss
from unipar.objective import Objective
from unipar.state import EngineState, StateSource
from unipar.strategy import Engine, EngineSpec, StepResult
from unipar.world import LossReduction, World

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class ModuleEngine(Engine):
    """A module whose gradients the subclasses' hooks reduce; here, on one process, nobody does.

    Loss and gradient are means over all items of the global batch. The count of items is known
    beforehand when the loss is a mean over samples. With :class:`LossSum` it is known only after
    the last micro-batch. No backward pass waits for it: losses are divided by a power of two near
    it, which rounds nothing, and gradients once by the rest before they are clipped.

    Args:
        spec: what the user asked for.
        world: the joined processes.
        module: the user's module, on its device.
        model: what the loss function is given: the module, or the framework's wrapper of it.
        undo: called by :meth:`close`, newest first.
    """

    def __init__(
        self,
        spec: EngineSpec,
        world: World,
        module: nn.Module,
        model: nn.Module | None = None,
        undo: Iterable[Callable[[], None]] = (),
    ) -> None:
        self.spec, self.world = spec, world
        self.module = module
        self._model = module if model is None else model
        self._undo = list(undo)
        self._device = world.device
        self._dtype = COMPUTE_DTYPES[spec.precision]
        self._mixed = self._dtype is not torch.float32
        self.optimizer = None
        self.lr_scheduler = None
        if spec.optimizer is not None:
            self.optimizer = self._build_optimizer()
            if spec.lr_scheduler is not None:
                self.lr_scheduler = spec.lr_scheduler(self.optimizer)
        self._guard_optimizer()
        # Frozen ones too: they may be thawed between steps.
        self._all_parameters = list(module.parameters())
        self._parameters = self._all_parameters
        self._scaler = (
            torch.amp.GradScaler(self._device.type) if self._dtype is torch.float16 else None
        )
        # The most so far; kept in checkpoints, for in fp16 it decides what overflows.
        self._items_per_sample = 1.0
        self._modes: list[tuple[nn.Module, bool]] = []
        self._last = False
        self._hidden: list[tuple[nn.Parameter, torch.Tensor | None, AbsentGradient]] = []
        self._clear()

    # -- what a way of being distributed changes -------------------------------------------------

    def _build_optimizer(self) -> torch.optim.Optimizer:
        assert self.spec.optimizer is not None
        return self.spec.optimizer(self.module.named_parameters())

    def _microbatch(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one of several micro-batches."""
        return contextlib.nullcontext()

    def _probing(self) -> AbstractContextManager[None]:
        """Around a forward and backward pass that another rank may not come to the end of."""
        return self._microbatch(last=False)

    def _finish_gradients(self) -> None:
        """See to it that every gradient is summed over ranks, once.

        Over whichever ranks hold the parameter: the number of items of the global batch, and no
        number of ranks, has divided what the loss adds. Where a framework can only average, this
        takes its division back.

        Raises:
            ConfigError: some gradient is not, and cannot be.
        """

    def _call_by_hand(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of a user's own loop, which may hold several before a backward pass."""
        return self._model(*args, **kwargs)

    @property
    def _holds_forwards(self) -> bool:
        """Whether the framework bears several forward passes before their backward passes."""
        return True

    @property
    def _gradients_elsewhere(self) -> bool:
        """Whether a change of ``parameter.grad`` is no change of the step's gradient, or unseen."""
        return False

    def _guard_optimizer(self) -> None:
        """Refuse a user's own ``optimizer.step()`` in a step of the engine's."""
        optimizer = self.optimizer
        if optimizer is None:
            return
        engine = weakref.ref(self)

        def refuse(*args: Any, **kwargs: Any) -> None:
            if (own := engine()) is not None and own._total is not None:
                own._clear()
                raise ConfigError(
                    "engine.optimizer was told to step or to clear gradients between "
                    "engine.backward(loss) and engine.step(), where gradients are not yet those of "
                    "the global batch, or not in the optimizer's hands. Call engine.step(), which "
                    "reduces, clips, steps and clears."
                )

        self._undo.append(optimizer.register_step_pre_hook(refuse).remove)
        if self._gradients_elsewhere:
            clear = optimizer.zero_grad

            def zero_grad(set_to_none: bool = True) -> None:
                refuse()
                clear(set_to_none)

            optimizer.zero_grad = zero_grad  # pyright: ignore[reportAttributeAccessIssue]
            self._undo.append(lambda: optimizer.__dict__.pop("zero_grad", None))

    def _begin_by_hand(self) -> None:
        """What comes before the first forward pass of a step in a user's own loop."""

    def _unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the loss scale out of the gradients, unless clipping or stepping does."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def _gradient_norm(self, max_norm: float) -> float:
        """Clip the gradients to ``max_norm`` unless it is infinite; their norm before."""
        if math.isinf(max_norm):
            grads = [p.grad for p in self._parameters if p.grad is not None]
            return nn.utils.get_total_norm(grads).item()
        return nn.utils.clip_grad_norm_(self._parameters, max_norm).item()

    def _sync_buffers(self) -> None:
        """Give every rank the buffers of rank 0 (ranks see different batches in BatchNorm)."""
        if self.world.size == 1:
            return
        by_kind: dict[Any, list[torch.Tensor]] = {}
        for buffer in self.module.buffers():
            by_kind.setdefault((buffer.dtype, buffer.device), []).append(buffer.detach())
        for buffers in by_kind.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            dist.broadcast(flat, src=0)
            for buffer, sent in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                buffer.copy_(sent.view(buffer.shape))

    # -- training --------------------------------------------------------------------------------

    def train_step(self, batch: Batch, loss_fn: LossFn) -> StepResult:
        self._require_optimizer()
        self._enter_training()
        last = len(batch.microbatches) - 1
        self._num_samples = batch.global_num_samples
        try:
            if last == 0:
                self._accumulate(batch.microbatches[0], loss_fn, batch, last=True)
            else:
                for index, microbatch in enumerate(batch.microbatches):
                    with self._microbatch(index == last):
                        self._accumulate(microbatch, loss_fn, batch, last=index == last)
            mark(self.num_steps + 1, "optimizer step")
            return self._update()
        except BaseException:
            self._clear()
            raise

    def _accumulate(
        self, microbatch: MicroBatch, loss_fn: LossFn, batch: Batch, *, last: bool
    ) -> None:
        mark(self.num_steps + 1, "forward")
        left = self._gradients()
        loss = self._loss(self._model, microbatch, loss_fn, training=True)
        if left != (now := self._gradients()):
            triples = zip(self._all_parameters, left, now, strict=True)
            # What other engines have left before the first one is dropped, whatever became of it.
            began = self._total is not None
            self._refuse_touched(
                [p for p, then, found in triples if found != then and (began or then == _NONE)]
            )
        samples = microbatch.num_samples
        if not isinstance(loss, LossSum):
            self._add(loss, samples, samples, last=last, num_items=batch.global_num_samples)
        elif samples:
            self._add(loss.total, 1, loss.count, last=last)
        else:
            self._add(loss.total, 0, 0, last=last)

    def _add(
        self,
        loss: torch.Tensor,
        weight: float,
        count: torch.Tensor | float,
        *,
        last: bool,
        num_items: float | None = None,
    ) -> None:
        """Add the gradient of ``weight * loss / (items of the global batch)``.

        Args:
            loss: scalar tensor.
            weight: what makes a sum over this micro-batch's items of it.
            count: how many items those are.
            last: whether no micro-batch follows.
            num_items: items of the global batch, if known beforehand.
        """
        if self._total is None:
            self._refuse_between()
            # Another engine's loss may have gone through this model (a GAN's generator's).
            self._drop_gradients()
            self._total, self._scale = loss.detach(), weight
            self._normalizer = self._expected_items() if num_items is None else float(num_items)
        else:
            self._total = self._total * self._scale + loss.detach() * weight
            self._scale = 1.0
        self._count = self._count + count
        if last:
            self._start_reduction()
        # Of ranks nothing is divided by: gradients are summed over whichever group reduces them.
        factor = weight / self._normalizer
        mark(self.num_steps + 1, "backward")
        with backward_pass():
            self._backward(loss if factor == 1.0 else loss * factor)

    def _refuse_between(self) -> None:
        """Refuse a step that begins within one of an engine with parameters in common."""
        for other in self.sharing:
            if isinstance(other, ModuleEngine) and other._total is not None:
                raise ConfigError(
                    f"engine '{self.spec.name}' begins a step while engine '{other.spec.name}' has "
                    "gradients that it has not stepped by, and they have parameters in common, so "
                    "these would be lost. Call step() of each engine before backward() of the "
                    "next, or prepare one module that holds both."
                )

    def _expected_items(self) -> float:
        """The power of two nearest to the most items that the global batch should have.

        The same on every rank and in a resumed run, and known without asking another rank. Where it
        is much too low, as in a run's first step if a sample has many items, fp16 may overflow,
        which skips the step. A batch with fewer items than others does not lower it.
        """
        expected = self._items_per_sample * self._num_samples
        return 2.0 ** round(math.log2(expected))

    def _finish_loss(self) -> tuple[float, float, float]:
        """The loss of the step, its number of items, and what gradients are still to be divided by.

        Waits for the other ranks.
        """
        assert self._reduction is not None
        loss, count = self._reduction.wait()
        self._items_per_sample = max(self._items_per_sample, count / self._num_samples)
        return loss, count, count / self._normalizer

    def _start_reduction(self) -> None:
        assert self._total is not None
        self._reduction = self.world.start_reduce_loss(self._total, self._count, self._scale)

    def _backward(self, loss: torch.Tensor) -> None:
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        loss.backward()

    def _update(self) -> StepResult:
        loss, count, divisor = self._finish_loss()
        self._finish_gradients()
        self._clear()
        optimizer = self._require_optimizer()
        self.num_steps += 1
        if not math.isfinite(loss) and self.spec.on_nan != "ignore":
            self._drop_gradients()
            return self._not_finite("loss", loss, count)
        self._unscale(optimizer)
        # A step without any item has no mean, and neither has its gradient.
        self._scale_gradients(1 / divisor if divisor else math.nan)
        norm = None
        if self.spec.max_grad_norm is not None:
            norm = self._gradient_norm(self.spec.max_grad_norm)
            finite = math.isfinite(norm) or self._scaler is not None
            if not finite and self.spec.on_nan != "ignore":
                self._drop_gradients()
                return self._not_finite("gradient norm", loss, count)
        skipped = not self._step_optimizer(optimizer)
        if not skipped:
            self._step_scheduler()
        self._drop_gradients()
        return StepResult(loss, count, norm, skipped)

    def _scale_gradients(self, factor: float) -> None:
        grads = [p.grad for p in self._parameters if p.grad is not None]
        # A rank may hold none, where a small model is divided among many.
        if grads and factor != 1:
            torch._foreach_mul_(grads, factor)  # pyright: ignore[reportPrivateImportUsage]

    def _drop_gradients(self) -> None:
        # The optimizer's `zero_grad()` does no more, and takes twenty times as long.
        for parameter in self._all_parameters:
            parameter.grad = None

    def _step_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step, and return whether the weights changed (fp16 gradients may have overflowed)."""
        if self._scaler is None:
            optimizer.step()
            return True
        scale = self._scaler.get_scale()
        self._scaler.step(optimizer)
        self._scaler.update()
        return self._scaler.get_scale() >= scale

    def _not_finite(self, what: str, loss: float, count: float) -> StepResult:
        if self.spec.on_nan == "skip":
            return StepResult(loss, count, None, skipped=True)
        step = self.num_steps
        self.num_steps -= 1
        raise NonFiniteLossError(
            f"the {what} of step {step} is not finite (loss {loss}); the weights are as they were "
            "before that step. Lower the learning rate, clip with max_grad_norm=1.0, look at the "
            "batch, or pass on_nan='skip' to leave such batches out.",
            step=step,
        )

    def _require_optimizer(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise ConfigError(
                f"engine '{self.spec.name}' was prepared without an optimizer: "
                "pass prepare(model, optimizer=...) to train it."
            )
        return self.optimizer

    def _clear(self) -> None:
        self._total: torch.Tensor | None = None
        self._scale: float = 1.0
        self._count: torch.Tensor | float = 0
        self._normalizer = 0.0
        # In a loop of the user's own, where nobody says how many there are.
        self._num_samples = self.spec.global_batch_size or 1
        self._reduction: LossReduction | None = None
        self._by_hand = self._begun = self._told = False
        self._forwards = 0
        self._left: list[tuple[int, int]] = []
        self._passes = 0
        self._show_gradients()

    # -- the user's own loop ---------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self._enter_training()
            # A gradient that the loss takes of its model may need those that were hidden.
            self._check_left_alone()
            if not self._begun:
                self._begun = True
                self._begin_by_hand()
                self._left, self._passes = self._gradients(), passes_begun()
            elif self._total is not None:
                self._left = self._gradients()
            self._forwards += 1
        if not self._mixed:
            return self._call_by_hand(*args, **kwargs)
        with torch.autocast(self._device.type, self._dtype):
            return self._call_by_hand(*args, **kwargs)

    @contextlib.contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        with self._microbatch(last):
            self._told, self._last = True, last
            try:
                yield
            finally:
                self._last = False

    def backward(self, loss: Loss, *, num_items: float | None = None) -> None:
        self._require_optimizer()
        check_loss(loss, training=True)
        if self._reduction is not None:
            raise ConfigError(
                "engine.backward(loss) came after the one in engine.microbatch(last=True), whose "
                "gradients are reduced already. Pass last=True for the last backward pass before "
                "engine.step() alone, or leave microbatch out: step() then reduces what there is."
            )
        if not self._forwards and not self._holds_forwards:
            raise ConfigError(
                "this backward pass has no forward pass of its own: there was none since the "
                "backward pass before it. Under this strategy each forward pass is followed by its "
                "backward pass, before the next one begins: put both into `with "
                "engine.microbatch(last=…):`, or use strategy='fsdp' or 'ddp', which hold several."
            )
        self._check_left_alone()
        self._by_hand, self._forwards = True, 0
        if isinstance(loss, LossSum):
            self._add(loss.total, 1, loss.count, last=self._last)
        elif num_items is not None:
            self._add(loss, num_items, num_items, last=self._last)
        else:
            raise ConfigError(
                "engine.backward(loss) needs to know how many items the loss is a mean of, since "
                "micro-batches and ranks may hold different numbers: pass num_items=len(inputs), "
                "or a unipar.LossSum(total, count)."
            )
        self._hide_gradients()
        self._left = self._gradients()

    def _hide_gradients(self) -> None:
        """Let nobody take for the step's gradients what is, or is not, in ``parameter.grad``."""
        if not self._gradients_elsewhere:
            return
        for parameter in self._all_parameters:
            if parameter.requires_grad:
                grad, absent = parameter.grad, AbsentGradient.of(parameter)
                parameter.grad = absent
                self._hidden.append((parameter, grad, absent))

    def _show_gradients(self) -> None:
        while self._hidden:
            parameter, grad, absent = self._hidden.pop()
            if parameter.grad is absent:
                parameter.grad = grad

    def _gradients(self) -> list[tuple[int, int]]:
        """Which gradients there are, and how often each was changed; not their values."""
        return [_identity(parameter.grad) for parameter in self._all_parameters]

    def _check_left_alone(self) -> None:
        """Refuse gradients that something else than :meth:`backward` has touched in this step."""
        if not self._begun and self._total is None:
            return
        now = self._gradients()
        self._show_gradients()
        if self._left == now or (self._total is None and self._passes != passes_begun()):
            # Before this engine's first backward pass in a step, those of others may go through
            # its model, as a GAN's do; what they leave is dropped by that pass.
            return
        # Before the first backward pass of a step a loop may clear what another engine has left.
        began = self._total is not None
        triples = zip(self._all_parameters, self._left, now, strict=True)
        self._refuse_touched(
            [p for p, then, found in triples if found != then and (began or found != _NONE)]
        )

    def _refuse_touched(self, changed: Sequence[nn.Parameter]) -> None:
        if not changed:
            return
        ids = {id(parameter) for parameter in changed}
        names = [name for name, p in self.module.named_parameters() if id(p) in ids]
        self._clear()
        raise ConfigError(
            f"gradients were changed by something else than the engine's own backward pass: "
            f"{first_few(names)}. They are not yet what the "
            "optimizer gets: not divided by the number of items, and on most strategies not "
            "reduced over the ranks. Clip with prepare(…, max_grad_norm=…), scale the loss instead "
            "of its gradient, add losses before one engine.backward(loss), let no other engine's "
            "backward pass go through this model before engine.step(); and in a loss function take "
            "gradients by torch.autograd.grad, not by backward() and zero_grad()."
        )

    def step(self) -> StepResult:
        if self._total is None:
            raise ConfigError("engine.step() has nothing to do: call engine.backward(loss) first.")
        self._check_left_alone()
        if self._reduction is None:
            if self._told:
                self._clear()
                raise ConfigError(
                    "engine.step() came before a backward pass in engine.microbatch(last=True), "
                    "which is where gradients are reduced. Pass last=True for the last backward "
                    "pass of each step, or leave microbatch out: step() then reduces what there is."
                )
            self._start_reduction()
        try:
            return self._update()
        except BaseException:
            self._clear()
            raise

    # -- evaluation ------------------------------------------------------------------------------

    def eval_step(self, microbatch: MicroBatch, loss_fn: LossFn) -> LossSum:
        self._enter_evaluation()
        with torch.no_grad():
            loss = self._loss(self.module, microbatch, loss_fn, training=False)
        total, count = (
            (loss.total, loss.count)
            if isinstance(loss, LossSum)
            else (loss * microbatch.num_samples, microbatch.num_samples)
        )
        if microbatch.num_samples == 0:
            return LossSum(torch.zeros_like(total, dtype=torch.float64), 0)
        return LossSum(total.double(), count)

    def probe(self, microbatch: MicroBatch, loss_fn: LossFn) -> None:
        self._enter_training()
        buffers = [buffer.clone() for buffer in self.module.buffers()]
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices), self._probing():
            try:
                loss = self._loss(self._model, microbatch, loss_fn, training=True)
                with backward_pass():
                    (loss.total if isinstance(loss, LossSum) else loss).backward()
            finally:
                self._drop_gradients()
                with torch.no_grad():
                    for buffer, saved in zip(self.module.buffers(), buffers, strict=True):
                        buffer.copy_(saved)

    def _loss(
        self, model: nn.Module, microbatch: MicroBatch, loss_fn: LossFn, *, training: bool
    ) -> Loss:
        data = microbatch.data
        if isinstance(loss_fn, Objective):
            loss_fn = loss_fn.counted(data)
        if self._device.type != "cpu":
            data = move_to(data, self._device)
        if not self._mixed:
            loss = loss_fn(model, data)
            self._check_loss(loss, training=training)
            return loss
        with torch.autocast(self._device.type, self._dtype):
            loss = loss_fn(model, data)
        self._check_loss(loss, training=training)
        # Weighting in half precision would round loss and gradient once more on each rank.
        if isinstance(loss, LossSum):
            return LossSum(loss.total.float(), loss.count)
        return loss.float()

    def _check_loss(self, loss: Loss, *, training: bool) -> None:
        check_loss(loss, training=training)
        if self.world.layout.cp > 1 and not isinstance(loss, LossSum):
            raise ConfigError(
                "the loss function returned a mean over samples, and each rank holds a part of "
                "every sequence, so each sample would count once for each part. Return "
                "unipar.LossSum(total, count) over the tokens of this rank's part."
            )

    def _enter_training(self) -> None:
        if self._modes:
            for module, training in self._modes:
                module.training = training
            self._modes = []

    def _enter_evaluation(self) -> None:
        if not self._modes:
            self._sync_buffers()
            self._modes = [(module, module.training) for module in self.module.modules()]
            self.module.eval()

    # -- state -----------------------------------------------------------------------------------

    def export_state(self) -> EngineState:
        self._sync_buffers()
        state = export_state(self.module, self.optimizer, self.lr_scheduler, self.world)
        return self._with_counters(state)

    def _with_counters(self, state: EngineState) -> EngineState:
        if self._scaler is not None:
            state.extra["scaler"] = self._scaler.state_dict()
        state.extra["num_steps"] = self.num_steps
        state.extra["items_per_sample"] = self._items_per_sample
        return state

    def import_state(self, source: StateSource, *, optimizer: bool = True) -> None:
        own = self.optimizer if optimizer else None
        import_state(source, self.module, own, self.lr_scheduler if optimizer else None)
        if optimizer:
            self._restore_counters(source)

    def _restore_counters(self, source: StateSource) -> None:
        if self._scaler is not None:
            import_scaler(self._scaler, source)
        self.num_steps = int(source.extra.get("num_steps", 0))
        self._items_per_sample = float(source.extra.get("items_per_sample", 1.0))

    def close(self) -> None:
        self._enter_training()
        while self._undo:
            self._undo.pop()()


_NONE = (id(None), 0)


def _identity(grad: torch.Tensor | None) -> tuple[int, int]:
    if grad is None or isinstance(grad, AbsentGradient):
        return id(grad), 0
    # Frameworks whose gradients are views of one buffer make such views anew.
    return id(grad) if grad.is_sparse else grad.data_ptr(), grad._version
