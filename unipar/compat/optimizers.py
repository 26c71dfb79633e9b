"""Optimizers behind a face: built before the model is divided, and stepped by its engine."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from unipar.compat.engine_steps import EngineSteps
from unipar.compat.fresh_state import may_begin
from unipar.compat.models import PreparedModel
from unipar.compat.own_methods import run_own
from unipar.compat.parts_of_state import PartsOfState
from unipar.compat.run import current, own_randomness
from unipar.engine import StepEngine
from unipar.engine.absent import LoopCalls
from unipar.engine.held_groups import HeldGroups
from unipar.engine.state import local_optimizers
from unipar.errors import ConfigError
from unipar.session import Session
from unipar.state import is_dtensor
from unipar.strategy import Engine

Kind = TypeVar("Kind", bound="PreparedOptimizer")


class PreparedOptimizer(EngineSteps, Optimizer):
    """An optimizer that its model's engine steps.

    Args:
        optimizer: the user's, which goes on to hold groups and state.
        session: the open one.
        accumulating: whether the step goes on, so that the script's step and zero_grad wait.
        may_skip: whether a step may leave the weights as they were.

    Attributes:
        own_buffers: whether the script's framework leaves each rank its buffers, from the start
            on; ``None``: as what the script has asked of the run does.
        frozen: names of parameters that were frozen when it took the model.
    """

    keeps_model: ClassVar[bool] = False
    """Whether it holds its model, which else goes when the script lets go of it."""
    own_buffers: bool | None = None
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
        super().__init__(optimizer, session, may_skip=may_skip)
        self._accumulating = accumulating

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
        # Looked at in every backward pass, in which a model is not to be gone through.
        self._may_thaw = [
            (name, weakref.ref(parameter))
            for name, parameter in engine.module.named_parameters()
            if name in self.frozen
        ]
        shares = isinstance(engine, StepEngine) and self._follow_script(engine, leaves=leaves)
        # A scheduler that a script has left over has this optimizer, and is to hold no model.
        self._model = (lambda: model) if self.keeps_model else weakref.ref(model)
        self.training = model.trained_by(engine, self.drop)
        self._find_apart()
        self.training.shares_buffers = shares
        _MODELS[engine] = weakref.ref(model)
        _TRAINING.add(self)

    def _follow_script(self, engine: StepEngine, *, leaves: bool) -> bool:
        """Have an engine do as the script's framework does.

        Args:
            engine: of the model.
            leaves: whether it leaves each rank its buffers.

        Returns:
            Whether passes begin with rank 0's buffers where those of DDP do.
        """
        session = self._session
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
        self._lend_gradients(engine)
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
        return shares

    def _lend_gradients(self, engine: StepEngine) -> None:
        """Have gradients be in ``parameter.grad`` when the script looks, where they are whole."""
        world, sharded = self._session.world, self._session.capabilities.sharded
        if world.data_size == world.size and not sharded & {"parameters", "gradients"}:
            held = weakref.WeakMethod(self.fetch_gradients)

            def fetch() -> None:
                if (call := held()) is not None:
                    call()

            engine.lend_gradients(fetch, self._unused_finder(), kept=True)
        elif world.size > 1:
            # What is there before the step is one rank's, where a script expects the mean.
            engine.reducer.hides_gradients = True

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
