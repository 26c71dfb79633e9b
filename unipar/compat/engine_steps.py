"""The steps of an optimizer whose model an engine trains: from a loss to new weights."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from unipar.compat.carried import CarriedGradients
from unipar.compat.models import Calls, PreparedModel, Training
from unipar.compat.norms import StepNorm
from unipar.compat.run import current
from unipar.engine import PrecisionPolicy, StepEngine, share_scale
from unipar.engine.absent import AbsentGradient
from unipar.engine.guard import FindUnused
from unipar.engine.replaced import put_in_place
from unipar.engine.used import UsedAnywhere
from unipar.errors import ConfigError, first_few
from unipar.loss import LossSum
from unipar.session import Session
from unipar.strategy import StepResult

log = logging.getLogger("unipar")

LEFT_TO_RANKS = (
    "frozen when {call} took the model, and trained now. {name} leaves the gradients of these to "
    "each rank, so that replicas drift apart; here they are averaged over ranks as all others are. "
    "Wrap the {what} anew where they are thawed, and both do the same."
)
"""What a framework makes of parameters that are thawed after it has hooks on the others."""
_DDP = LEFT_TO_RANKS.format(call="DistributedDataParallel", name="DDP", what="model")


class EngineSteps:
    """What an engine steps an optimizer by, as the script's framework would have it.

    Args:
        optimizer: the user's, which goes on to hold groups and state.
        session: the open one.
        may_skip: whether a step may leave the weights as they were.

    Attributes:
        optimizer: the user's.
        training: the engine of what it updates, once both are prepared.
        begun: whether a loss came since the last step.
        stepped: whether it has stepped since the last loss of any model.
        synced: whether the framework sums over ranks what a pass of this step has left.
        steps_own: whether the last step was by gradients of each rank's own.
        cleared: whether gradients were dropped since then, and not of a step that came since then.
        strayed: whether a loss that trains another model has left gradients in this one's.
        same_parameters: whether the script's framework is DDP, which asks that a backward pass
            gives gradients to the same parameters on every rank.
        finds_unused: whether passes of its model may leave parameters unused, as its wrapper says;
            else as what the script has asked of the run does.
        alike: whether all ranks make the same calls, as where the script knows nothing of them.
        clears: whether the script has to clear gradients after a step, as PyTorch asks.
        uncleared: whether it has stepped, and gradients that it has to clear were not since.
        of_thawed: what the script's framework does with those that are thawed later, if it is
            something else.
    """

    calls: ClassVar[Calls] = Calls()
    same_parameters: bool = False
    finds_unused: bool = False
    alike: bool = False
    clears: bool = True
    of_thawed: str | None = None
    own_passes: ClassVar[str] = "within no_sync(), or around the wrapper of the model"
    """Of which passes the script's framework leaves gradients to each rank, for messages."""
    own_remedy: ClassVar[str] = (
        "Have the last backward pass of a step by the wrapper and out of no_sync()"
    )

    def __init__(self, optimizer: Optimizer, session: Session, *, may_skip: bool) -> None:
        self.optimizer = optimizer
        self._model: Callable[[], PreparedModel | None] = lambda: None
        self.training: Training | None = None
        self.begun = self.cleared = self.strayed = self.uncleared = self.stepped = False
        self.synced = self.steps_own = self._carries_own = False
        self._session, self._may_skip = session, may_skip
        self._limit: float | None = None
        self._norm: StepNorm | None = None
        self._carried = CarriedGradients()
        self._last: StepResult | None = None
        self._may_thaw: list[tuple[str, weakref.ref[nn.Parameter]]] = []
        self._left_out: frozenset[str] = frozenset()
        self._apart: list[nn.Parameter] = []
        self._scripts: list[weakref.ref[nn.Parameter]] = []
        self._told_of_zeros = self._told_of_own = self._dropped = self._ends_own = False

    @property
    def model(self) -> PreparedModel | None:
        """What it updates, once both are prepared."""
        return self._model()

    def is_in(self, session: Session) -> bool:
        """Whether an engine of a session steps it, which no script has let go of."""
        training = self.training
        return training is not None and training.engine in session.engines.values()

    @property
    def divided(self) -> bool:
        """Whether each rank has a part of the state."""
        return bool(self._session.capabilities.sharded & {"parameters", "optimizer"})

    def _find_apart(self) -> None:
        """Find what its zero_grad() leaves alone."""
        held = {id(one) for one in self._updated()}
        module = self._known().engine.module
        named = [*module.named_parameters()]
        self._apart = [one for _, one in named if id(one) not in held]
        # A framework may have put others into the groups, which the script does not have.
        self._scripts = [weakref.ref(one) for name, one in named if name not in self._left_out]

    def backward(
        self,
        loss: torch.Tensor,
        *,
        likely_last: bool = False,
        unsynced: bool | None = None,
        beside: Sequence[EngineSteps] = (),
    ) -> None:
        """Add the gradient of a loss: a step is on the mean over ranks of the sum of them.

        Args:
            loss: scalar tensor.
            beside: other optimizers, whose models it trains, too.
            likely_last: whether the framework would reduce gradients in this pass, on every rank,
                so that a step is likely to follow.
            unsynced: whether it would leave those of this pass to each rank; left out: as DDP does.
        """
        training = self._known()
        if self.strayed:
            raise ConfigError(
                "a loss of another model has left gradients in this one, which would be added to "
                f"this loss's. Call this optimizer's zero_grad() before {self.calls.backward}."
            )
        if not training.called and self._session.world.size > 1:
            # DDP's reducer is armed by its forward: frameworks let replicas drift apart here.
            raise ConfigError(
                f"{self.calls.backward} came without a call of the model since the last step, so "
                f"the loss was computed around it, as by {self.calls.unwrap}(…). Compute it of "
                f"what the model that {self.calls.prepare} gives back returns."
            )
        if self.clips:
            raise ConfigError(
                f"{self.calls.clip} came before this {self.calls.backward} in one step. Strategy "
                f"'{self._session.strategy.name}' clips as the optimizer steps, and would clip the "
                "gradients of this loss, too. Clip after the last backward pass of a step; or use "
                "a strategy that leaves gradients whole, such as ddp."
            )
        self._tell_of_thawed()
        if self.begun:
            self._carried.drop_cleared()
        own = training.leaves_own if unsynced is None else unsynced
        self._keep_what_is_there(own=own)
        self._carried.take_zeros()
        if self._carries_own and not own and self._session.world.size > 1:
            # DDP sums all that is there.
            self._carried.average(training.engine.module.parameters(), self._session.world)
            self._carries_own = False
        self._ends_own = own
        self.synced |= not own
        try:
            part, run = LossSum(loss, 0.0 if self.begun else 1.0), None
            if beside:
                share_scale_of([self, *beside])
                # Each engine begins its step before the pass that leaves gradients in all models.
                first, *rest = beside
                run = functools.partial(first.backward, loss, beside=rest)
            training.engine.backward(
                part,
                likely_last=likely_last and not (own or beside),
                same_parameters=self.same_parameters,
                run=run,
            )
        except BaseException:
            training.failed = True
            raise
        self.begun = True
        training.end_pass()

    @property
    def sums_what_is_there(self) -> bool:
        """Whether a pass is added to whatever is in ``p.grad``, and all of it summed over ranks."""
        return self.lends_gradients and self.clears and not (self.divided or self.alike)

    def _keep_what_is_there(self, *, own: bool) -> None:
        """Before a backward pass: keep gradients to which PyTorch adds, and an engine does not.

        Args:
            own: whether the framework leaves the gradients of this pass to each rank.

        Raises:
            ConfigError: the strategy has no place for them.
        """
        training = self._known()
        engine = training.engine
        if self.uncleared and self.sums_what_is_there:
            # What the last step was by is there until the script clears it.
            self._carries_own |= self.steps_own
            self._set_aside(engine.module.parameters())
            self.uncleared = False
            return
        if self.begun:
            if self.sums_what_is_there and (self._is_fetched or (own and self.synced)):
                self.fetch_gradients()
                self._set_aside(engine.module.parameters())
                engine.zero_grad()
                self.begun = self.synced = False
                self._carries_own = True
            return
        if not self.clears or training.failed:
            return
        if self.lends_gradients:
            # What the script's zero_grad() leaves alone adds up from step to step.
            self._set_aside(self._apart)
        if not self.uncleared and self._has_put():
            if not self.sums_what_is_there:
                raise self._put_before()
            self._set_aside(self._updated())
            self._carries_own = True

    def _set_aside(self, parameters: Iterable[nn.Parameter]) -> None:
        zeros = self._carried.zeros
        for parameter in parameters:
            if parameter.grad is not None and id(parameter) not in zeros:
                self._carried.keep([(parameter, parameter.grad.clone())])
                parameter.grad = None

    def _updated(self) -> Iterator[nn.Parameter]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def _tell_of_thawed(self) -> None:
        """Warn once of parameters that the script's framework would not train so."""
        said = self.of_thawed
        if said is None and self.same_parameters and self._session.world.size > 1:
            said = _DDP
        if said is None:
            return
        thawed = sorted(
            name for name, ref in self._may_thaw if (one := ref()) is not None and one.requires_grad
        )
        if thawed:
            self._may_thaw = []
            log.warning("%s: %s", first_few(thawed), said)

    @property
    def clips(self) -> bool:
        """Whether the step is clipped already."""
        return self._norm is not None

    @property
    def lends_gradients(self) -> bool:
        """Whether the script may use ``parameter.grad`` between backward pass and step."""
        engine = self._known().engine
        return isinstance(engine, StepEngine) and engine.lends_gradients

    @property
    def precision(self) -> PrecisionPolicy | None:
        """What scales its losses, if that is an engine's part."""
        engine = self._known().engine
        return engine.precision if isinstance(engine, StepEngine) else None

    @property
    def holds_scaled(self) -> bool:
        """Whether there are gradients that its engine's scale is still in, where it has one."""
        engine = self._known().engine
        return self.begun and isinstance(engine, StepEngine) and not engine.fetched

    @property
    def is_own(self) -> bool:
        """Whether the framework leaves the gradients of this step to each rank, so far."""
        alone = self.alike or self._session.world.size == 1
        return not (self.synced or alone) and self.lends_gradients

    def fetch_gradients(self) -> None:
        """Leave in ``parameter.grad`` what the step will be by, clipped if it is. Collective.

        Or what this rank has of its own, where the framework leaves that there, and not collective.
        It is called when the script uses one of them.

        Raises:
            ConfigError: this rank's own has a scale in it.
        """
        if self.begun:
            self._carried.drop_cleared()
        self._fetch()

    def _fetch(self) -> None:
        engine = self._known().engine
        assert isinstance(engine, StepEngine)
        if not (self.begun and self.is_own):
            engine.fetch_gradients()
        elif engine.precision.scaler is not None:
            raise self._scaled_own()
        else:
            engine.lend_own_gradients()
        self._carried.add()

    def _scaled_own(self) -> ConfigError:
        return ConfigError(
            f"gradients of passes {self.own_passes}, are each rank's own, and here the loss scale "
            f"of fp16 is still in them. Use them in bf16 or fp32. {self.own_remedy}, and they are "
            "averaged."
        )

    def clip(self, max_norm: float, device: torch.device) -> torch.Tensor:
        """Clip the gradient to a 2-norm: now, where ranks have it whole, and in the step elsewhere.

        Returns:
            Its norm before, a scalar; what the step clips can be read after it.
        """
        self._refuse_strayed()
        if self.begun and self.lends_gradients:
            self.fetch_gradients()
            engine = self._known().engine
            assert isinstance(engine, StepEngine)
            return engine.clip_gradients(float(max_norm))
        if not self.begun or self.clips:
            raise ConfigError(
                f"{self.calls.clip.rpartition('.')[2]} came "
                + ("twice in one step" if self.begun else f"before {self.calls.backward}")
                + ". Call it once, between backward and optimizer.step()."
            )
        self._limit = float(max_norm)
        self._norm = StepNorm.expected(device, self.calls.clip)
        return self._norm

    def clip_given(self, max_norm: float, given: Sequence[torch.Tensor]) -> torch.Tensor:
        """:meth:`clip` what a script has given, which may be more than the optimizer updates.

        Raises:
            ConfigError: it is, and gradients are with what steps alone.
        """
        model = self.model
        assert model is not None
        if self._left_out and not self.lends_gradients:
            names = [model.name_of(one) for one in given if one.requires_grad]
            left = [name for name in names if name in self._left_out]
            if left:
                raise ConfigError(
                    f"{self.calls.clip}: the optimizer has some of the parameters that are "
                    f"clipped, and not {first_few(left)}. Strategy "
                    f"'{self._session.strategy.name}' has the gradients of what it steps alone. "
                    "Freeze the others (requires_grad_(False)), or use a strategy that leaves "
                    "gradients whole, such as ddp."
                )
        return self.clip(max_norm, self._session.world.device)

    def _refuse_strayed(self) -> None:
        """Refuse a step of a model by a loss that has trained another one."""
        if self.strayed and not self.begun:
            several = (
                "clear the gradients of all of them before it, by optimizer.zero_grad() of each."
                if self.lends_gradients else
                f"under strategy '{self._session.strategy.name}', put them into one nn.Module with "
                "one optimizer; or use a strategy that leaves gradients whole, such as ddp, and "
                "clear the gradients of all of them before it."
            )  # fmt: skip
            raise ConfigError(
                f"{self.calls.backward} was called for a loss that goes through several models, "
                f"and has trained another one. Where one loss trains several models {several}"
            )

    def take_step(self) -> None:
        """Reduce, clip, step and clear."""
        training = self._known()
        self._refuse_strayed()
        if not self.begun:
            raise ConfigError(
                f"optimizer.step() came without a gradient: {self.calls.backward} was not "
                f"called since the last step.{self._own_gradients()}"
            )
        # Not before: a script may clear what a loss of another model has left here.
        if self.uncleared:
            raise ConfigError(
                "optimizer.zero_grad() was not called since the last step: PyTorch would add this "
                "gradient to the last one, and an engine has cleared that. Call zero_grad() once "
                "for each step; p.grad = None is not seen."
            )
        own = self._may_step_own()
        if self._carried or own:
            self.fetch_gradients()
        if self._ends_own and not (own or self.alike):
            self._tell_of_own()
        limit, norm, engine = self._limit, self._norm, training.engine
        put_in_place(self.optimizer.param_groups)
        self._forget()
        try:
            if own:
                assert isinstance(engine, StepEngine)
                self._last = None
                engine.step_by_hand()
            else:
                self._last = engine.step(max_grad_norm=limit)
        except BaseException:
            training.failed = True
            raise
        training.called = training.apart = False
        self.uncleared, self.stepped = self.clears, True
        self.steps_own = own
        if norm is not None and self._last is not None and not norm.settled:
            norm.settle(self._last)

    def _may_step_own(self) -> bool:
        """Whether the step is by what the framework has left each rank, and can be."""
        return self.is_own and self._may_differ()

    def _may_differ(self) -> bool:
        """Whether ranks may step by gradients that are not alike."""
        engine = self._known().engine
        return (
            not self.divided
            and isinstance(engine, StepEngine)
            and engine.precision.scaler is None
            # What the engine clips in its steps it has reduced.
            and engine.spec.max_grad_norm is None
        )

    @property
    def _is_fetched(self) -> bool:
        """Whether gradients of this step are summed already, for the script has used one."""
        engine = self._known().engine
        return isinstance(engine, StepEngine) and engine.fetched

    def _tell_of_own(self) -> None:
        """Warn once of a step by the mean over ranks that the script's framework would not take."""
        world = self._session.world
        if world.size > 1 and world.is_main and not self._told_of_own:
            self._told_of_own = True
            log.warning(
                "the last backward pass of a step was %s: the framework of the script leaves its "
                "gradients to each rank, which steps by its own then, and strategy '%s' steps by "
                "the mean over ranks. %s, and both do the same; or use ddp in fp32 or bf16, which "
                "steps as the script does.",
                self.own_passes, self._session.strategy.name, self.own_remedy,
            )  # fmt: skip

    def drop(self, *, set_to_none: bool = True, of: Iterable[nn.Parameter] | None = None) -> None:
        """Drop the gradients that there are.

        Args:
            set_to_none: whether none is left in their place, or zeros, by which optimizers step
                too: weights decay, and momentum moves them.
            of: whose; left out: of what the optimizer updates.
        """
        training = self._known()
        held: list[nn.Parameter] = []
        if self.lends_gradients:
            held = [p for p in (self._updated() if of is None else of) if p.grad is not None]
        if self.begun or training.failed or not self.lends_gradients:
            training.engine.zero_grad()
        if not self.lends_gradients:
            for parameter in self._known_to_script():
                # Of a loss of another model, or a script's own.
                if not isinstance(parameter.grad, AbsentGradient):
                    parameter.grad = None
        for parameter in held:
            parameter.grad = None
        training.failed = self.strayed = self.uncleared = False
        # What is cleared after its step tells nothing of the loss that comes next.
        self.cleared, self._dropped = not self.stepped, True
        self._forget()
        if set_to_none:
            return
        world = self._session.world
        if not (self.lends_gradients or self._told_of_zeros) and world.size > 1 and world.is_main:
            self._told_of_zeros = True
            log.warning(
                "zero_grad(set_to_none=False): strategy '%s' drops gradients, and leaves no zeros "
                "in their place. That is the same, except to parameters that a later step does "
                "not use: an optimizer would decay or move these by zeros, and leaves them here.",
                self._session.strategy.name,
            )
        if self.alike:
            for parameter in held:
                parameter.grad = torch.zeros_like(parameter)
        else:
            self._carried.put_zeros(held)
            if isinstance(training.engine, StepEngine):
                training.engine.note_gradients()

    def _has_gradients(self) -> bool:
        """Whether something is in ``parameter.grad`` of what it updates."""
        return any(one.grad is not None for one in self._updated())

    def _has_put(self) -> bool:
        """Whether the script has put gradients there, and not an engine or ``zero_grad``."""
        zeros = self._carried.zeros
        held = self._updated() if self.lends_gradients else self._known_to_script()
        found = (one for one in held if one.grad is not None and id(one) not in zeros)
        return any(not isinstance(one.grad, AbsentGradient) for one in found)

    def _known_to_script(self) -> Iterator[nn.Parameter]:
        """What it updates, as the model has it."""
        return (one for ref in self._scripts if (one := ref()) is not None)

    def _put_before(self) -> ConfigError:
        return ConfigError(
            "there are gradients in p.grad before the first backward pass of a step by "
            f"{self.calls.backward} of what a call of the model gave: PyTorch would add to them, "
            "and an engine begins each step without any. Clear them by optimizer.zero_grad(), add "
            "penalties to the loss, and change gradients after the last backward pass of a step; "
            "or use a strategy that leaves gradients and optimizers whole, such as ddp."
        )

    def _own_gradients(self) -> str:
        """Where steps are by gradients that a script has put there, if not here."""
        return ""

    def _unused_finder(self) -> FindUnused:
        held = weakref.WeakMethod(self._find_unused)
        return lambda parameters: call(parameters) if (call := held()) is not None else ()

    def _find_unused(self, parameters: Sequence[nn.Parameter]) -> Collection[nn.Parameter]:
        """Find, after a backward pass, parameters that have a gradient on no rank."""
        carried = self._carried.parameters
        if self.is_own:
            return [p for p in parameters if p.grad is None and p not in carried]
        if self.alike or self._session.world.size == 1:
            known = self._session.world.size == 1 or self._known().uses_alike
            return [p for p in parameters if p.grad is None and p not in carried] if known else ()
        if current.unsynced or not (self.finds_unused or current.asks_for_unused()):
            return ()
        trained = [p for p in parameters if p.requires_grad]
        return UsedAnywhere(trained, None, carried).unused() if trained else ()

    def _forget(self) -> None:
        self.begun, self._limit, self._norm = False, None, None
        self.synced = self._carries_own = False
        self._carried.forget()
        self._known().uses_alike = True

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step left the weights as they were."""
        # To look may wait for the device.
        return self._may_skip and self._last is not None and self._last.skipped

    def _known(self) -> Training:
        if self.training is None:
            raise ConfigError(
                f"the {type(self.optimizer).__name__} was prepared, and the model that it updates "
                f"was not. Prepare both: {self.calls.optimized}."
            )
        return self.training


def share_scale_of(optimizers: Iterable[EngineSteps]) -> None:
    """Have one backward pass leave gradients by one scale in the models of several optimizers.

    Raises:
        ConfigError: gradients that they have already are of several scales.
    """
    begun: list[PrecisionPolicy] = []
    fresh: list[PrecisionPolicy] = []
    for one in optimizers:
        if one.precision is not None:
            (begun if one.holds_scaled else fresh).append(one.precision)
    share_scale(begun, fresh)
