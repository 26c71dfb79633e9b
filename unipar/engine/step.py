"""A training step put together of parts: how gradients are reduced, how precision is applied, how
the optimizer steps, how state is exported, and how a pipeline is run."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unipar.combined import optimizers_in
from unipar.data.batch import Batch, MicroBatch
from unipar.engine.absent import LoopCalls
from unipar.engine.agreement import Agreement
from unipar.engine.average import LossAverage
from unipar.engine.divider import Divider, PartOf
from unipar.engine.divisible import has_modes
from unipar.engine.divisors import Divisors
from unipar.engine.first_step import watch_first_step
from unipar.engine.guard import FindUnused, GradientGuard, find_none, guard_optimizer
from unipar.engine.held_groups import HeldGroups
from unipar.engine.inner import backward_pass
from unipar.engine.kept_buffers import KeptBuffers
from unipar.engine.last_step import LastStep, keep_hyperparameters, not_finite
from unipar.engine.losses import compute_loss
from unipar.engine.own_loop import OwnLoop, parts_of
from unipar.engine.parameter_hooks import ParameterHooks
from unipar.engine.pipeline import Pipeline
from unipar.engine.precision import PrecisionPolicy
from unipar.engine.reducer import Reducer
from unipar.engine.sample_checks import check_rows
from unipar.engine.sample_dropout import OPTION, SampleDropout
from unipar.engine.schedule import Schedule
from unipar.engine.skips import Skips
from unipar.engine.state import ModelState, ModuleState, export_scheduler, import_scheduler
from unipar.engine.stepper import OptimizerStepper, Stepper
from unipar.errors import ConfigError
from unipar.loss import Loss, LossFn, LossSum, check_loss
from unipar.optimizers.named import takes_metric
from unipar.state import EngineState, LocalState, StateSource, check_extra_state
from unipar.strategy import Engine, EngineSpec, StepResult
from unipar.utils.host_copy import HostCopy
from unipar.utils.progress_marks import mark
from unipar.world import World


class StepEngine(Engine):
    """The engine of every strategy, around the parts in which they differ.

    Loss and gradient are means over all items of the global batch. What is not given is as in a
    plain loop on one device. A strategy's ``prepare`` builds the parts, and nothing is overridden.

    Args:
        spec: what the user asked for.
        world: the joined processes.
        module: the user's module, on its device, divided or wrapped already.
        optimizer: the user's, built over the parameters as they are now; the scheduler is built
            here.
        model: what a loss function is given in training: the module, or a wrapper of it.
        eval_model: what it is given in evaluation; left out: the module.
        loop_model: what ``engine(…)`` calls in a user's own loop; left out: ``model``.
        reducer: runs backward passes, and sums gradients over ranks.
        precision: surrounds forward passes, and scales losses.
        stepper: divides, clips and steps.
        state: what the model and its optimizer keep in checkpoints.
        schedule: runs a pipeline; a user's own loop is then refused.
        divider: gives each rank a part of its samples; a user's own loop is then refused.
        check_loss: refuses losses, before their backward passes.
        undo: called by :meth:`close`, newest first.

    Attributes:
        model: what a loss function is given in training.
        eval_model: what it is given in evaluation.
        loop_model: what ``engine(…)`` calls in a user's own loop.
        reducer: runs backward passes, and sums gradients over ranks.
        precision: surrounds forward passes, and scales losses.
        stepper: divides, clips and steps; ``None`` without an optimizer.
        state: what the model and its optimizer keep in checkpoints.
        schedule: runs a pipeline; ``None`` without one.
        average: the loss of the step so far.
        agreement: what ranks are to have in common.
        hooks: of the parameters, which are looked at before each backward pass; ``None`` where
            they are not.
        groups: of the optimizer, which are looked at before each step; ``None`` where they may
            hold anything.
        leaves_buffers: whether what is saved has rank 0's buffers, and each rank keeps its own.
    """

    leaves_buffers = False

    def __init__(
        self,
        spec: EngineSpec,
        world: World,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        model: nn.Module | None = None,
        eval_model: nn.Module | None = None,
        loop_model: Callable[..., Any] | None = None,
        reducer: Reducer | None = None,
        precision: PrecisionPolicy | None = None,
        stepper: Stepper | None = None,
        state: ModelState | None = None,
        schedule: Schedule | None = None,
        divider: Divider | None = None,
        check_loss: Callable[[torch.Tensor], None] | None = None,
        undo: Iterable[Callable[[], None]] = (),
    ) -> None:
        self.spec, self.world, self.module = spec, world, module
        self.optimizer = optimizer
        self.lr_scheduler = None
        if optimizer is not None and spec.lr_scheduler is not None:
            self.lr_scheduler = spec.lr_scheduler(optimizer)
            if takes_metric(self.lr_scheduler):
                # As torch's other schedulers do: what was given is then known when a run goes on.
                for group in optimizer.param_groups:
                    group.setdefault("initial_lr", group["lr"])
        self.model = module if model is None else model
        self.eval_model = module if eval_model is None else eval_model
        self.loop_model = self.model if loop_model is None else loop_model
        self.reducer = Reducer(module, world) if reducer is None else reducer
        if precision is None:
            precision = PrecisionPolicy(spec.precision, world.device)
        self.precision = precision
        if spec.loss_scale is not None:
            precision.scale_as(spec.loss_scale.scaler_state())
        if stepper is None and optimizer is not None:
            stepper = OptimizerStepper(optimizer, precision, module.parameters())
        self.stepper = stepper
        self.state = ModuleState(module, optimizer, world) if state is None else state
        self.average = LossAverage(world)
        self._guard = GradientGuard(self.reducer)
        self.schedule, self._pipeline = schedule, None
        if schedule is not None:
            self._pipeline = Pipeline(schedule, world, precision, self.average, self._guard)
        self._whole_steps = schedule is not None or divider is not None
        self._divider = divider
        self._loss = functools.partial(compute_loss, world=world, precision=precision)
        self._check_loss = check_loss
        self._dropout: SampleDropout | None = None
        if spec.dropout_seed == "sample":
            self._dropout = SampleDropout(spec.seed, spec.name, module, world.device)
        self._looked_at = 0
        self._undo = [self.reducer.close, *undo]
        if optimizer is not None:
            clearing = self.reducer.hides_gradients
            self._undo.append(guard_optimizer(optimizer, self, clearing=clearing))
        self._evaluated = False
        self._given_up = False
        self._reduced: tuple[float, float, float] | None = None
        self.agreement = Agreement(optimizer, world, self.reducer)
        self.hooks: ParameterHooks | None = None
        self.groups: HeldGroups | None = None
        self._last_step: LastStep | None = None
        self._buffers = KeptBuffers(module) if spec.on_nan == "skip" else None
        self._skips = Skips(tells=world.is_main)
        self._undo.append(self._skips.close)
        self._loop = OwnLoop()
        self._untried = True
        self._divisors = Divisors(world)
        each = () if optimizer is None else optimizers_in(optimizer).values()
        self._modal: list[Any] = [one for one in each if has_modes(one)]
        self._resting = bool(self._modal)
        if optimizer is not None:
            # What cannot be saved is refused now, and not by the first save.
            check_extra_state(module)
            export_scheduler(self.lr_scheduler, EngineState([]))
        self._clear()

    @property
    def num_parameters(self) -> int:
        return self.state.num_parameters

    # -- training --------------------------------------------------------------------------------

    def train_step(self, batch: Batch, loss_fn: LossFn) -> StepResult:
        if self.optimizer is None:
            self._require_optimizer()
        if self._loop.broken:
            self._loop.refuse_broken(self._guard.calls)
        if self.average.begun:
            raise ConfigError(
                "engine.train_step(…) came in the middle of a step of a loop of your own. Call "
                "engine.step() before it, or engine.zero_grad() to give that step up."
            )
        self._evaluated = False
        self._loop.whole_step = True
        if self._resting:
            self._wake()
        try:
            if self._given_up:
                self._drop_given_up()
            if self._dropout is not None and batch.global_num_samples > self._looked_at:
                self._check_dropout(self._dropout, batch, loss_fn)
            self.reducer.begin(whole_step=True)
            self._begin()
            if self._pipeline is not None:
                if self.hooks is not None:
                    self.hooks.check(is_whole=False)
                self.average.begin(batch.global_num_samples)
                fingerprint = self.agreement.fingerprint(self.num_steps)
                self._pipeline.train(batch, loss_fn, self.num_steps + 1, fingerprint)
            else:
                # A graph takes time to free: not before the optimizer's kernels are queued.
                _held = self._run_microbatches(batch, loss_fn)
            mark(self.num_steps + 1, "optimizer step")
            return self._update()
        except BaseException:
            self.give_up()
            raise

    def _run_microbatches(self, batch: Batch, loss_fn: LossFn) -> Loss | None:
        """Forward and backward passes of a step; the last loss, with its graph."""
        if not self._whole_steps:
            self._divisors.begin(self.num_steps, len(batch))
        run = self._pass if self._dropout is None and self._divider is None else self._divided_pass
        last = len(batch.microbatches) - 1
        if last == 0:
            return run(batch.microbatches[0], loss_fn, batch, last=True)
        loss = None
        for index, microbatch in enumerate(batch.microbatches):
            with self.reducer.microbatch(last=index == last):
                loss = run(microbatch, loss_fn, batch, last=index == last)
            if index < last:
                # What its graph keeps would be held beside the next one's.
                loss = None
        return loss

    def _divided_pass(
        self, microbatch: MicroBatch, loss_fn: LossFn, batch: Batch, *, last: bool
    ) -> Loss:
        with (
            self._drawing(microbatch),
            self._dividing(self.model, microbatch, loss_fn) as part_of,
        ):
            return self._pass(microbatch, loss_fn, batch, part_of, last=last)

    def _drawing(self, microbatch: MicroBatch) -> AbstractContextManager[None]:
        if self._dropout is None:
            return contextlib.nullcontext()
        return self._dropout.drawing(self.num_steps, microbatch)

    def _check_dropout(self, dropout: SampleDropout, batch: Batch, loss_fn: LossFn) -> None:
        """Look at a batch that may have more samples on each rank than those before it."""
        compute = functools.partial(
            self._loss, self.eval_model, loss_fn=loss_fn, part_of=None, training=False
        )
        check_rows(
            dropout,
            self.module,
            batch.microbatches[0],
            self.num_steps,
            compute,
            self.world,
            exact=self.precision.dtype is torch.float32,
        )
        self._looked_at = batch.global_num_samples

    def _dividing(
        self, model: nn.Module, microbatch: MicroBatch, loss_fn: LossFn
    ) -> AbstractContextManager[PartOf | None]:
        if self._divider is None:
            return contextlib.nullcontext()
        return self._divider.dividing(model, microbatch, loss_fn)

    def _pass(
        self,
        microbatch: MicroBatch,
        loss_fn: LossFn,
        batch: Batch,
        part_of: PartOf | None = None,
        *,
        last: bool,
    ) -> Loss:
        mark(self.num_steps + 1, "forward")
        # Before the first backward pass there is no gradient: the reducer has cleared them.
        marks = self._guard.look() if self.average.begun else self._guard.nothing
        loss = self._loss(self.model, microbatch, loss_fn, part_of, training=True)
        self._guard.compare(marks)
        self._divisors.note(loss, microbatch.num_samples)
        if self._dropout is not None:
            self._dropout.end_forward()
        if not self.average.begun:
            averaged = not isinstance(loss, LossSum)
            expected = batch.global_num_samples
            self.average.begin(expected, expected if averaged else None)
        samples = microbatch.num_samples
        if not isinstance(loss, LossSum):
            self._add(loss, samples, samples, last=last)
        elif samples:
            self._add(loss.total, 1, loss.count, last=last)
        else:
            self._add(loss.total, 0, 0, last=last)
        return loss

    def _begin(self) -> None:
        if self.sharing:
            self._refuse_between()
        # Another engine's loss may have gone through this model (a GAN's generator's).
        self.reducer.clear()
        if self._buffers is not None:
            if self._loop.whole_step:
                self._buffers.keep()
            else:
                # In a loop of the user's own the first forward pass has been.
                self._buffers.forget()

    def _add(
        self, loss: torch.Tensor, weight: float, count: torch.Tensor | float, *, last: bool,
        run: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """Add the gradient of ``weight * loss / (items of the global batch)``.

        Args:
            loss: scalar tensor.
            weight: what makes a sum over this micro-batch's items of it.
            count: how many items those are.
            last: whether no micro-batch follows.
            run: another engine's backward pass of this loss, in the place of this one's.
        """
        if self._check_loss is not None:
            self._check_loss(loss)
        kept = loss.detach()
        if self.spec.compile and (not last or self._loop.guessed):
            # A CUDA graph writes what it gives into the same memory in its next pass.
            kept = kept.clone()
        self.average.add(kept, weight, count)
        if last:
            self.average.start(self.agreement.fingerprint(self.num_steps))
        # Of ranks nothing is divided by: gradients are summed over whichever group reduces them.
        factor = weight / self.average.normalizer
        if self.hooks is not None and not self.average.keeps_scale:
            self.hooks.check(is_whole=last and weight == self.average.normalizer)
        elif self.hooks is not None and not self.reducer.calls_hooks:
            self.hooks.check_called()
        mark(self.num_steps + 1, "backward")
        if run is not None:
            run()
            return
        with backward_pass():
            scaled = self.precision.scale(loss if factor == 1.0 else loss * factor)
            if last and self._loop.guessed:
                # What only seems to be the last is not for a reducer that could not go on after it.
                last = self._loop.summed
            self.reducer.backward(scaled, last=last)

    def _refuse_between(self) -> None:
        """Refuse a step that begins within one of an engine with parameters in common."""
        for other in self.sharing:
            if isinstance(other, StepEngine) and other.average.begun:
                raise ConfigError(
                    f"engine '{self.spec.name}' begins a step while engine '{other.spec.name}' has "
                    "gradients that it has not stepped by, and they have parameters in common, so "
                    "these would be lost. Call step() of each engine before backward() of the "
                    "next, or prepare one module that holds both."
                )

    def _update(self, max_grad_norm: float | None = None) -> StepResult:
        if self.groups is not None:
            self.groups.check()
        loss, count, divisor = self._reduced or self._reduce()
        self._clear()
        # The device has come past that step by now, in which it began to reduce this one's loss.
        if self._last_step is not None:
            self.check_last_step()
        self.num_steps += 1
        if not math.isfinite(loss) and self.spec.on_nan != "ignore":
            self.reducer.discard()
            if self.spec.on_nan == "skip":
                # A scaler would find it in the gradients.
                self.precision.lower()
            return self._not_finite("loss", loss, count)
        assert self.stepper is not None
        if self._resting:
            self._wake()
        careful = self.spec.on_nan != "ignore"
        limit = self.spec.max_grad_norm if max_grad_norm is None else max_grad_norm
        step = functools.partial(self.stepper.step, divisor, limit, careful=careful)
        if self._untried and self.optimizer is not None:
            step = functools.partial(watch_first_step, self.optimizer, self.world, step)
        norm, stepped, finite = step()
        self._note_step()
        self._untried = self._untried and not stepped
        if not self._guard.lends:
            self.reducer.clear()
        if finite is None and self.spec.on_nan == "skip":
            assert isinstance(norm, HostCopy)
            finite = math.isfinite(norm.read())
        if finite is False:
            return self._not_finite("gradient norm", loss, count)
        moving = self.lr_scheduler if stepped else None
        if moving is not None and takes_metric(moving):
            # A plateau's waits for it.
            moving = None
        check = None
        if finite is None:
            assert isinstance(norm, HostCopy)
            self._last_step = self._expect(norm, loss, moving)
            check = functools.partial(self._last_step.check, again=True)
        if moving is not None:
            moving.step()
        if self._buffers is not None:
            self._buffers.take()
        self._skips.add(self.num_steps, skipped=not stepped)
        return StepResult(loss, count, norm, skipped=not stepped, check=check)

    def _note_step(self) -> None:
        self.agreement.note_step()
        if self.groups is not None:
            self.groups.note()

    def _reduce(self) -> tuple[float, float, float]:
        """Sum loss and gradient over ranks; the loss, its items, and what is yet to divide by."""
        reduced = self.average.finish()
        if not self.average.alike:
            self.agreement.refuse()
        if self._loop.summed:
            self.reducer.finish_guessed(lent=self._guard.lends)
        else:
            self.reducer.finish()
        # Not before: ranks are known to be in the same step, and to have reduced alike.
        self._divisors.compare()
        return reduced

    def _not_finite(self, what: str, loss: float, count: float) -> StepResult:
        if self._buffers is not None:
            self._buffers.put_back()
            self._skips.add(self.num_steps, skipped=True)
            return StepResult(loss, count, None, skipped=True)
        self.num_steps -= 1
        step, calls = self.num_steps + 1, self._guard.calls
        raise not_finite(what, loss, step, self.module, calls, count)

    def _expect(self, norm: HostCopy, loss: float, moving: LRScheduler | None) -> LastStep:
        """Go on as if the gradient of this step were finite."""
        step, optimizer = self.num_steps, self.optimizer
        assert optimizer is not None
        put_back = None if moving is None else keep_hyperparameters(moving, optimizer)

        def take_back() -> None:
            self.num_steps = step - 1
            # Ranks that read the result, and alone, must not go on beside those that did not.
            self.world.give_up_step()
            if put_back is not None:
                put_back()

        calls = self._guard.calls
        error = functools.partial(not_finite, "gradient norm", loss, step, self.module, calls)
        return LastStep(norm, error, take_back)

    def check_last_step(self) -> None:
        last, self._last_step = self._last_step, None
        if last is not None:
            last.check()

    def _require_optimizer(self) -> None:
        if self.optimizer is None:
            raise ConfigError(
                f"engine '{self.spec.name}' was prepared without an optimizer: "
                "pass prepare(model, optimizer=...) to train it."
            )

    def _clear(self) -> None:
        self.average.clear()
        self._loop.clear()
        self._guard.clear()
        self._divisors.forget()
        self._reduced = None
        self.agreement.forget()
        self.reducer.forget()

    def give_up(self) -> None:
        """Be ready for another step after one that failed."""
        self.world.give_up_step()
        self._clear()
        if isinstance(self.stepper, OptimizerStepper):
            self.stepper.give_up()
        self._given_up = True

    def _drop_given_up(self) -> None:
        """Throw away what a step that failed has left. Where it failed, others may not have yet."""
        if self._given_up:
            self.reducer.discard()
            self._given_up = False

    # -- the user's own loop ---------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._whole_steps:
            return super().__call__(*args, **kwargs)
        if torch.is_grad_enabled():
            self._evaluated = False
            if self._resting:
                self._wake()
            if self._dropout is not None and not self._loop.whole_step:
                raise ConfigError(
                    f"{OPTION} knows by the batch which samples are computed, and a loop of your "
                    "own gives the engine tensors. Call engine.train_step(batch, loss_fn), or set "
                    "dropout_seed='rank'."
                )
            self._loop.refuse_broken(self._guard.calls)
            if self._loop.cleared:
                # What was computed before is likely to have no backward pass: where one rank alone
                # has left a batch out, the others are to hear of it.
                self._loop.cleared = False
                self.world.give_up_step()
            # A gradient that the loss takes of its model may need those that were hidden.
            self._guarded(self._guard.open)
            if not self._loop.by_hand and not self._loop.whole_step:
                self._loop.by_hand = True
                self._drop_given_up()
                self.reducer.begin(whole_step=False)
                if self.reducer.shares_buffers:
                    self.reducer.share_buffers()
            self._loop.forwards += 1
        else:
            self._drop_given_up()
        with self._loop, self._guard.lifted():
            if not self.precision.surrounds:
                return self.loop_model(*args, **kwargs)
            with self.precision.forward():
                return self.loop_model(*args, **kwargs)

    def zero_grad(self) -> None:
        if self._whole_steps:
            super().zero_grad()
        if self.average.begun or self._loop.broken:
            self.give_up()
        else:
            # A forward pass that has been may be of the next loss.
            self._loop.cleared = self._loop.forwards > 0
            self._guard.clear()

    @contextlib.contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        if self._whole_steps:
            super().microbatch(last=last)
        with self._loop, self.reducer.microbatch(last=last):
            self._loop.told, self._loop.last = True, last
            try:
                yield
            finally:
                self._loop.last = False

    def backward(
        self,
        loss: Loss,
        *,
        num_items: float | None = None,
        likely_last: bool = False,
        same_parameters: bool = False,
        run: Callable[[], None] | None = None,
    ) -> None:
        if self._whole_steps:
            super().backward(loss, num_items=num_items)
        self._require_optimizer()
        self._loop.refuse_broken(self._guard.calls)
        check_loss(loss, training=True)
        goes_on = self._loop.guessed and not self.fetched
        self._loop.check_backward(
            self._guard.calls,
            reducing=self.average.reducing and not goes_on,
            holds_forwards=self.reducer.holds_forwards,
        )
        self._guarded(self._guard.check)
        if goes_on:
            self.average.reopen()
            if self._loop.summed:
                self.reducer.reopen()
        total, weight, count = parts_of(loss, num_items)
        self._loop.by_hand, self._loop.forwards, self._loop.cleared = True, 0, False
        if not self.average.begun:
            # In a loop of the user's own nobody may have said how many there are.
            self._drop_given_up()
            self._begin()
            self.average.begin(self.spec.global_batch_size or 1)
        # Alone, a loss may be on its way to the host in any pass, and another take its place.
        self._loop.guessed = (likely_last or self.world.size == 1) and not self._loop.told
        self._loop.summed = self._loop.guessed and same_parameters and self.reducer.reopens
        with self._loop:
            self._add(total, weight, count, last=self._loop.last or self._loop.guessed, run=run)
        self._guard.hide()

    def step(self, *, max_grad_norm: float | None = None) -> StepResult:
        if self._whole_steps:
            return super().step()
        self._loop.refuse_broken(self._guard.calls)
        if not self.average.begun:
            raise ConfigError("engine.step() has nothing to do: call engine.backward(loss) first.")
        try:
            self._guard.check(begun=True)
            if self.average.reducing:
                # What was changed since the last backward pass, the next step finds.
                self.agreement.note_late()
            else:
                self._loop.check_step()
                self.average.start(self.agreement.fingerprint(self.num_steps))
            return self._update(max_grad_norm)
        except BaseException:
            self.give_up()
            raise

    def lend_gradients(
        self,
        fetch: Callable[[], None] | None = None,
        find_unused: FindUnused = find_none,
        *,
        kept: bool = False,
    ) -> None:
        """Let a user's own loop read and change ``parameter.grad`` from backward pass to step.

        What it finds there is the gradient that :meth:`step` is by, and after the step it stays
        there until the next one begins. Where gradients are elsewhere, nothing changes.

        Args:
            fetch: called once the loop asks for it, and calls :meth:`fetch_gradients`; left out:
                that itself.
            find_unused: finds among parameters those that have a gradient on no rank, after each
                backward pass; left out: nobody knows, and all are taken to have one.
            kept: whether the loop itself keeps what is there as a step's first backward pass
                begins; else it is not to put anything there.
        """
        if isinstance(self.stepper, OptimizerStepper) and not self.reducer.hides_gradients:
            self._guard.lend(fetch or self.fetch_gradients, find_unused, kept)

    def note_gradients(self) -> None:
        """Go on where the caller has cleared gradients, or has zeros in their place."""
        self._guard.note()

    def lend_own_gradients(self) -> None:
        """Leave in ``parameter.grad`` what this rank's backward passes have left, summed by nobody.

        The loop may do with it what it likes, and the next backward pass adds to it.
        """
        self._guarded(self._guard.check)
        self._guard.lent()

    def step_by_hand(self) -> None:
        """Step by what is in ``parameter.grad``, each rank by its own.

        A loop has put it there, or :meth:`lend_own_gradients`; nothing is summed.
        """
        assert self.optimizer is not None
        if self.average.begun:
            self.world.give_up_step()
            self._clear()
        if self.groups is not None:
            self.groups.check()
        self.optimizer.step()
        self._note_step()
        self._guard.clear()

    def hide_gradients(self) -> None:
        """After a step that has cleared them: let nobody find none where others have them."""
        self._guard.hide(stepped=True)

    def speak_of(self, calls: LoopCalls) -> None:
        """Name the calls of a loop that is not by the engine's own in messages."""
        self._guard.calls = calls

    def without_stand_ins(self) -> AbstractContextManager[None]:
        """Surround a pass that does not go through the engine."""
        return self._guard.lifted()

    @property
    def lends_gradients(self) -> bool:
        """Whether a loop may use ``parameter.grad`` between backward pass and step."""
        return self._guard.lends

    @property
    def fetched(self) -> bool:
        """Whether :meth:`fetch_gradients` was called in this step."""
        return self._reduced is not None

    @property
    def gradients_changed(self) -> bool:
        """Whether the loop has changed what :meth:`fetch_gradients` has put there."""
        return self._guard.changed

    def fetch_gradients(self) -> None:
        """Leave in ``parameter.grad`` what :meth:`step` will be by. Collective.

        Ranks that do not call it take the same part in it when they step.
        """
        if self._reduced is not None or not self.average.begun:
            return
        assert isinstance(self.stepper, OptimizerStepper)
        try:
            self._guard.check(begun=True)
            if not self.average.reducing:
                self._loop.check_step()
                self.average.start(self.agreement.fingerprint(self.num_steps))
            self._reduced = self._reduce()
            self.stepper.normalize(self._reduced[2])
        except BaseException:
            self.give_up()
            raise
        self._guard.lent()

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Clip what :meth:`fetch_gradients` or :meth:`lend_own_gradients` has left to a 2-norm.

        Returns:
            The norm before, a scalar tensor on the device.
        """
        assert isinstance(self.stepper, OptimizerStepper)
        with self._guard.changing():
            return self.stepper.clip_now(max_norm) if self.fetched else self.stepper.clip(max_norm)

    def _guarded(self, look: Callable[..., None]) -> None:
        """Look whether gradients were touched, and give the step up where they were."""
        try:
            look(begun=self.average.begun)
        except BaseException:
            self.give_up()
            raise

    # -- evaluation ------------------------------------------------------------------------------

    def eval_batch(self, batch: Batch, loss_fn: LossFn) -> LossSum:
        self.check_last_step()
        self._drop_given_up()
        sums = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        with torch.no_grad(), self._evaluating():
            if self._pipeline is not None:
                self._pipeline.evaluate(batch, loss_fn, sums)
            else:
                for microbatch in batch.microbatches:
                    model = self.eval_model
                    with self._dividing(model, microbatch, loss_fn) as part_of:
                        loss = self._loss(model, microbatch, loss_fn, part_of, training=False)
                    samples = microbatch.num_samples
                    if isinstance(loss, LossSum):
                        total, count = loss.total, loss.count
                    else:
                        total, count = loss * samples, samples
                    if samples:
                        sums[0] += total
                        sums[1] += count
        return LossSum(sums[0], sums[1])

    def probe(self, microbatch: MicroBatch, loss_fn: LossFn) -> None:
        self.check_last_step()
        self._drop_given_up()
        self._evaluated = False
        buffers = [buffer.clone() for buffer in self.module.buffers()]
        device = self.world.device
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            self.reducer.probing(),
            self._drawing(microbatch),
            self._dividing(self.model, microbatch, loss_fn) as part_of,
        ):
            try:
                loss = self._loss(self.model, microbatch, loss_fn, part_of, training=True)
                if self._dropout is not None:
                    self._dropout.end_forward()
                total = loss.total if isinstance(loss, LossSum) else loss
                with backward_pass():
                    self.reducer.backward(total, last=False)
            finally:
                self.reducer.discard()
                self.reducer.forget()
                with torch.no_grad():
                    for buffer, saved in zip(self.module.buffers(), buffers, strict=True):
                        buffer.copy_(saved)

    def rest(self) -> None:
        self.check_last_step()
        for optimizer in self._modal:
            optimizer.eval()
        self._resting = bool(self._modal)

    def _wake(self) -> None:
        for optimizer in self._modal:
            optimizer.train()
        self._resting = False

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Have the model in evaluation mode, and afterwards as it was.

        Not until the next step alone: another engine's loss may go through it before, and the user
        may set modes.
        """
        if not self._evaluated:
            self.rest()
            self.reducer.share_buffers()
            self._evaluated = True
        modes = [(module, module.training) for module in self.module.modules()]
        self.module.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training

    # -- state -----------------------------------------------------------------------------------

    def export_state(self) -> EngineState:
        self.check_last_step()
        # Where parameters are gathered for a pass, one that failed may have left them so.
        self._drop_given_up()
        # Of the last step: no loss will be reduced after it, perhaps.
        self.agreement.refuse_passes()
        if not self.leaves_buffers:
            self.reducer.share_buffers()
            return self.own_state()
        copies = {name: one.detach().clone() for name, one in self.module.named_buffers()}
        self.reducer.share_buffers(copies.values())
        state = self.own_state()
        state.weights = (
            LocalState.of(one.name, copies[one.name]) if one.name in copies else one
            for one in state.weights
        )  # fmt: skip
        return state

    def own_state(self) -> EngineState:
        """Describe this engine's state, buffers as this rank has them.

        No collective where each rank holds all of it, so a rank can be asked that is alone.
        """
        state = self.state.export_state()
        export_scheduler(self.lr_scheduler, state)
        state.extra.update(self.precision.export_state())
        state.extra["num_steps"] = self.num_steps
        state.extra["items_per_sample"] = self.average.items_per_sample
        return state

    def import_state(self, source: StateSource, *, optimizer: bool = True) -> None:
        self.check_last_step()
        self.world.forget_steps()
        self.state.import_weights(source)
        if not optimizer:
            return
        if self.optimizer is not None:
            self.state.import_optimizer(source)
            if self.groups is not None:
                self.groups.note()
        import_scheduler(self.lr_scheduler, source)
        self.precision.import_state(source)
        self.num_steps = int(source.extra.get("num_steps", 0))
        self.average.items_per_sample = float(source.extra.get("items_per_sample", 1.0))

    def close(self) -> None:
        # A wrapper may hold memory, or a process group, for as long as it is held.
        self.model = self.eval_model = self.loop_model = self.module
        while self._undo:
            self._undo.pop()()
