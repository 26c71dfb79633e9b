"""Optimizers behind a face: built before the model is divided, and stepped by its engine."""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from unipar.compat.carried import CarriedGradients
from unipar.compat.fresh_state import may_begin
from unipar.compat.models import Calls, PreparedModel, Training
from unipar.compat.norms import StepNorm
from unipar.compat.own_methods import run_own
from unipar.compat.parts_of_state import PartsOfState
from unipar.compat.run import current, own_randomness
from unipar.engine import PrecisionPolicy, StepEngine, share_scale
from unipar.engine.absent import AbsentGradient, LoopCalls
from unipar.engine.guard import FindUnused
from unipar.engine.held_groups import HeldGroups
from unipar.engine.replaced import put_in_place
from unipar.engine.state import local_optimizers
from unipar.engine.used import UsedAnywhere
from unipar.errors import ConfigError, first_few
from unipar.loss import LossSum
from unipar.session import Session
from unipar.state import is_dtensor
from unipar.strategy import Engine, StepResult

log = logging.getLogger("unipar")
Kind = TypeVar("Kind", bound="PreparedOptimizer")
LEFT_TO_RANKS = (
    "frozen when {call} took the model, and trained now. {name} leaves the gradients of these to "
    "each rank, so that replicas drift apart; here they are averaged over ranks as all others are. "
    "Wrap the {what} anew where they are thawed, and both do the same."
)
"""What a framework makes of parameters that are thawed after it has hooks on the others."""
_DDP = LEFT_TO_RANKS.format(call="DistributedDataParallel", name="DDP", what="model")


class PreparedOptimizer(Optimizer):
    """An optimizer that its model's engine steps.

    Args:
        optimizer: the user's, which goes on to hold groups and state.
        session: the open one.
        accumulating: whether the step goes on, so that the script's step and zero_grad wait.
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
        own_buffers: whether it leaves each rank its buffers, from the start on; ``None``: as
            what the script has asked of the run does.
        finds_unused: whether passes of its model may leave parameters unused, as its wrapper says;
            else as what the script has asked of the run does.
        alike: whether all ranks make the same calls, as where the script knows nothing of them.
        clears: whether the script has to clear gradients after a step, as PyTorch asks.
        uncleared: whether it has stepped, and gradients that it has to clear were not since.
        of_thawed: what the script's framework does with those that are thawed later, if it is
            something else.
        frozen: names of parameters that were frozen when the script's framework took the model.
    """

    calls: ClassVar[Calls] = Calls()
    keeps_model: ClassVar[bool] = False
    """Whether it holds its model, which else goes when the script lets go of it."""
    same_parameters: bool = False
    own_buffers: bool | None = None
    finds_unused: bool = False
    alike: bool = False
    clears: bool = True
    of_thawed: str | None = None
    own_passes: ClassVar[str] = "within no_sync(), or around the wrapper of the model"
    """Of which passes the script's framework leaves gradients to each rank, for messages."""
    own_remedy: ClassVar[str] = (
        "Have the last backward pass of a step by the wrapper and out of no_sync()"
    )
    frozen: frozenset[str] | None = None

    # Not torch's own constructor: groups and state are the user's optimizer's.
    def __init__(
        self,
        optimizer: Optimizer,
        session: Session,
        *,
        accumulating: Callable[[], bool],
        may_skip: bool,
    ) -> None:
        self.optimizer = optimizer
        self._model: Callable[[], PreparedModel | None] = lambda: None
        self.training: Training | None = None
        self.begun = self.cleared = self.strayed = self.uncleared = self.stepped = False
        self.synced = self.steps_own = self._carries_own = False
        self._session, self._may_skip, self._accumulating = session, may_skip, accumulating
        self._limit: float | None = None
        self._norm: StepNorm | None = None
        self._carried = CarriedGradients()
        self._last: StepResult | None = None
        self._may_thaw: list[tuple[str, weakref.ref[nn.Parameter]]] = []
        self._left_out: frozenset[str] = frozenset()
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

    def model_among(self, models: Iterable[PreparedModel]) -> PreparedModel | None:
        """The model that this optimizer updates; ``None`` if it is not among these.

        Raises:
            ConfigError: it updates several, or parameters of none beside those of one.
        """
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        found = [(one, sum(one.name_of(p) is not None for p in held)) for one in models]
        owners = [(one, count) for one, count in found if count]
        if not owners:
            return None
        if len(owners) > 1 or owners[0][1] < len(held):
            raise ConfigError(
                f"the {type(self.optimizer).__name__} has {len(held)} parameters, of which "
                f"{' and '.join(str(count) for _, count in owners)} belong to prepared models. An "
                "optimizer here updates one model: put what it updates into one nn.Module, or "
                "give each model an optimizer of its own."
            )
        return owners[0][0]

    def takes_up(self, model: PreparedModel, **asked: Any) -> None:
        """Put the model under the strategy, with this optimizer. Collective.

        Engines of models that no script holds any more are released before.

        Args:
            model: what it updates.
            asked: of :meth:`unipar.Session.prepare`; a name that is free, where it has none.

        Raises:
            ConfigError: the strategy cannot do it; or another optimizer trains the model.
        """
        session = self._session
        current.claim(self.optimizer)
        if self.frozen is None:
            self.frozen = frozen_in(model.module)
        if model.training_by is not None:
            raise ConfigError(
                f"two optimizers update one {type(model.module).__name__}, which an engine steps "
                "with one. If every loss trains all of it, give one optimizer all of the "
                "parameters, in groups; if each optimizer steps a network by a loss of its own, as "
                "in a GAN, prepare these networks as models of their own."
            )
        if "name" not in asked:
            _release_unused(session)
            asked["name"] = _unused_name(session)
        held = {model.name_of(one) for one in self._updated()}
        named = model.module.named_parameters()
        self._left_out = frozenset(name for name, _ in named if name not in held)
        leaves = self.own_buffers or current.asks_for_own_buffers()
        own = {} if self.alike else model.own_buffers(from_start=leaves)
        with own_randomness(session.world.device):
            engine = session.prepare(model.module, optimizer=self._over(model), **asked)
        for name, buffer in engine.module.named_buffers():
            if name in own and own[name].shape == buffer.shape and not is_dtensor(buffer):
                buffer.detach().copy_(own[name])
        shares = False
        # Looked at in every backward pass, in which a model is not to be gone through.
        self._may_thaw = [
            (name, weakref.ref(parameter))
            for name, parameter in engine.module.named_parameters()
            if name in self.frozen
        ]
        if isinstance(engine, StepEngine):
            if not self.alike:
                # What ranks do with their own parts of the data is the script's.
                replicas = engine.agreement.replicas
                engine.agreement.replicas = replicas and replicas.of_script()
            engine.speak_of(
                LoopCalls(
                    self.calls.backward,
                    "the step",
                    "the optimizer's zero_grad()",
                    self.calls.clip,
                    self.calls.clip,
                    "set on_nan: skip in unipar.yaml",
                )
            )
            world, sharded = session.world, session.capabilities.sharded
            if world.data_size == world.size and not sharded & {"parameters", "gradients"}:
                held = weakref.WeakMethod(self.fetch_gradients)

                def fetch() -> None:
                    if (call := held()) is not None:
                        call()

                engine.lend_gradients(fetch, self._unused_finder(), kept=True)
            elif world.size > 1:
                # What is there before the step is one rank's, where a script expects the mean.
                engine.reducer.hides_gradients = True
        if isinstance(engine, StepEngine):
            # A script's own functions in the backward pass are to find what they find natively.
            engine.average.keeps_scale = True
            if leaves:
                shares = False
            elif session.capabilities.sharded:
                # What a script has written for DDP is to find what it finds there.
                shares = self.own_buffers is not None or current.asks_for_replicas()
            else:
                shares = engine.reducer.shares_buffers
            # Not once a step and in saves, but in the passes in which DDP does it.
            engine.reducer.shares_buffers &= self.alike
            engine.leaves_buffers = not self.alike
            self._hold_groups(engine)
        # A scheduler that a script has left over has this optimizer, and is to hold no model.
        self._model = (lambda: model) if self.keeps_model else weakref.ref(model)
        self.training = model.trained_by(engine, self.drop)
        self._find_apart()
        self.training.shares_buffers = shares
        _MODELS[engine] = weakref.ref(model)
        _TRAINING.add(self)

    def _find_apart(self) -> None:
        """Find what its zero_grad() leaves alone."""
        held = {id(one) for one in self._updated()}
        module = self._known().engine.module
        named = [*module.named_parameters()]
        self._apart = [one for _, one in named if id(one) not in held]
        # A framework may have put others into the groups, which the script does not have.
        self._scripts = [weakref.ref(one) for name, one in named if name not in self._left_out]

    def _hold_groups(self, engine: StepEngine) -> None:
        """Have the engine look at the groups that the script has."""
        session, optimizer = self._session, self.optimizer
        if engine.optimizer is not optimizer:
            # It is divided by another one.
            known = engine.module.parameters()
            engine.groups = HeldGroups(optimizer, known, session.strategy.name, apart=True)
        elif self.alike and not session.capabilities.sharded:
            # Gradients of what no engine has are the same on all ranks.
            engine.groups = None

    def _over(self, model: PreparedModel) -> Any:
        """Give the user's optimizer the parameters that take the place of those that it has."""
        optimizer, calls = self.optimizer, self.calls
        # An engine keeps what builds its optimizer, and is to hold no model.
        name_of = weakref.WeakMethod(model.name_of)
        divides = "optimizer" in self._session.capabilities.sharded

        def build(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
            final, known = dict(named), name_of()
            assert known is not None
            for group in optimizer.param_groups:
                for at, parameter in enumerate(group["params"]):
                    new = final.get(known(parameter) or "")
                    if new is None or not may_begin(optimizer, group, parameter, new, divides):
                        raise ConfigError(
                            f"the {type(optimizer).__name__} has state already, or "
                            "parameters that the model has not, and the strategy puts others in "
                            "their place. Prepare it before its first step; "
                            f"{calls.load} restores its state."
                        )
                    group["params"][at] = new
            return optimizer

        return build

    # -- a step ----------------------------------------------------------------------------------

    def backward(
        self,
        loss: torch.Tensor,
        *,
        likely_last: bool = False,
        unsynced: bool | None = None,
        beside: Sequence[PreparedOptimizer] = (),
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

    # -- the user's ------------------------------------------------------------------------------

    def step(self, closure: Any = None) -> Any:
        if self._accumulating():
            return None
        loss = self.run(closure)
        self.take_step()
        return loss

    def run(self, closure: Any) -> Any:
        """Run a closure once, as PyTorch's optimizers do before they step, and give its loss back.

        Raises:
            ConfigError: the optimizer may run it more often than that.
        """
        if closure is None:
            return None
        kind = type(self.optimizer)
        if not runs_once(kind):
            raise ConfigError(
                f"optimizer.step(closure): {kind.__name__} may run the model several times in a "
                "step, and an engine does once. Compute the loss and its gradients before, and "
                "call optimizer.step(); or use an optimizer of torch.optim other than LBFGS."
            )
        with torch.enable_grad():
            return closure()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if not self._accumulating():
            self.clear_as(self.optimizer, type(self.optimizer), *args, **kwargs)

    def clear_as(
        self, optimizer: Optimizer, kind: type[Optimizer], *args: Any, **kwargs: Any
    ) -> None:
        """:meth:`drop` gradients where the ``zero_grad`` of an optimizer's class does.

        Args:
            optimizer: the user's, or one around it.
            kind: its class, as the user has it.
            args: of its ``zero_grad``.
            kwargs: likewise.
        """

        def drop(set_to_none: bool = True) -> None:
            self.drop(set_to_none=set_to_none)

        if kind.zero_grad is Optimizer.zero_grad:
            # In every step, which is not to look at gradients for nothing.
            drop(*args, **kwargs)
            return

        # A framework may have put other tensors into the groups, which tell of none.
        seen, self._dropped = self._has_gradients() or not (self.begun or self.uncleared), False
        run_own(optimizer, kind, Optimizer, "zero_grad", drop, *args, **kwargs)
        if seen and not self._dropped and not self._has_gradients():
            # It has set them to None by itself, as that of Apex's FusedAdam does.
            self.drop()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        engine, model = None if self.training is None else self.training.engine, self.model
        if model is None or not isinstance(engine, StepEngine) or engine.optimizer is None:
            return self.optimizer.state
        if engine.groups is None or not engine.groups.apart:
            return self.optimizer.state
        (steps,) = local_optimizers(engine.optimizer)
        return PartsOfState(steps, model.name_of, self._session.strategy.name)

    @state.setter
    def state(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        held = self.state
        if isinstance(held, PartsOfState):
            held.clear()
            held.update(value)
        else:
            self.optimizer.state = value

    @property
    def defaults(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        # Whole replicas have the user's own optimizer, and its state is as long as its groups.
        if self.training is not None and (
            not self.lends_gradients or self._session.capabilities.sharded
        ):
            raise ConfigError(
                "add_param_group came after the model and its optimizer were prepared, and the "
                f"strategy '{self._session.strategy.name}' knows what it divides since then. Add "
                "the group before; or use a strategy that leaves the optimizer whole, such as ddp "
                "without shard_optimizer."
            )
        held = len(self.optimizer.param_groups)
        self.optimizer.add_param_group(param_group)
        if self.training is None:
            return
        added = self.optimizer.param_groups[held]["params"]
        if not self.alike and self._session.world.size > 1:
            known = self.model
            foreign = sum(known is None or known.name_of(one) is None for one in added)
            if foreign:
                del self.optimizer.param_groups[held:]
                raise ConfigError(
                    f"add_param_group was given {foreign} parameters that are not of the model "
                    "that the optimizer updates, so their gradients would not be summed over "
                    "ranks, and replicas would drift apart. Give what is new an optimizer of its "
                    "own, and call zero_grad() of both before each loss; or put all into one "
                    "nn.Module before its first forward pass."
                )
        if any(one.grad is not None for one in added):
            # PyTorch would add it to the next one's; an engine begins each step without any.
            del self.optimizer.param_groups[held:]
            raise ConfigError(
                "add_param_group was given parameters that have a gradient from backward passes "
                "before, which the next step would be by, too. Set their grad to None first, or "
                "their requires_grad to False until they are to be trained."
            )

    def state_dict(self) -> dict[str, Any]:
        self._refuse_parts()
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._refuse_parts()
        self.optimizer.load_state_dict(state_dict)

    def _refuse_parts(self) -> None:
        if self.divided:
            raise ConfigError(
                f"strategy '{self._session.strategy.name}' divides the optimizer's state among "
                "ranks, so its state_dict() here is only a part. Call "
                f"{self.calls.save} on all ranks, and {self.calls.load}."
            )

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return repr(self.optimizer)


def zero_unused(
    optimizer: Optimizer, *_: Any, trained: Sequence[Sequence[bool]] | None = None
) -> None:
    """Give parameters that no rank has used a gradient of zero, by which AdamW decays them.

    Args:
        optimizer: about to step.
        trained: which of them, by groups and their parameters, as of when the script's framework
            took the optimizer; those that are not frozen now, where that is ``None``, or a
            strategy has taken some out of a group.
    """
    for at, group in enumerate(optimizer.param_groups):
        held = group["params"]
        if trained is not None and at >= len(trained):
            continue
        if trained is None or len(trained[at]) != len(held):
            wanted = [one.requires_grad for one in held]
        else:
            wanted = trained[at]
        for parameter, zero in zip(held, wanted, strict=True):
            if zero and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def training_in(session: Session, kind: type[Kind]) -> list[Kind]:
    """The optimizers of one class whose models engines of a session train.

    A script may have several objects of its framework, such as two ``Accelerator``.
    """
    return [one for one in _TRAINING if isinstance(one, kind) and one.is_in(session)]


def share_scale_of(optimizers: Iterable[PreparedOptimizer]) -> None:
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


def runs_once(kind: type[Optimizer]) -> bool:
    """Whether the step of a class of optimizers runs a closure once, before all else."""
    step = kind.step
    return step.__module__.startswith("torch.optim.") and not issubclass(kind, torch.optim.LBFGS)


def frozen_in(module: nn.Module) -> frozenset[str]:
    """The names of the parameters that are not trained."""
    return frozenset(name for name, p in module.named_parameters() if not p.requires_grad)


_MODELS: weakref.WeakKeyDictionary[Engine, weakref.ref[PreparedModel]] = weakref.WeakKeyDictionary()
"""The models of engines."""
_TRAINING: weakref.WeakSet[PreparedOptimizer] = weakref.WeakSet()
"""Those whose models engines train."""


def _release_unused(session: Session) -> None:
    """Release the engines of models that no rank holds any more. Collective."""
    if not session.engines:
        return
    gc.collect()
    gone = {n for n, one in session.engines.items() if one in _MODELS and _MODELS[one]() is None}
    for name in sorted(set.intersection(*session.world.gather(gone))):
        session.release(name)


def _unused_name(session: Session) -> str:
    names = ("model", *(f"model{number}" for number in range(2, len(session.engines) + 2)))
    return next(name for name in names if name not in session.engines)
