"""Models behind a face: they are called as they were, and an engine computes."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from unipar.compat.fp32_outputs import fp32
from unipar.compat.gathering import GatheredModel, OnRank0
from unipar.compat.run import current, own_randomness
from unipar.engine import StepEngine, broadcast_tensors, replace_forward, share_buffers
from unipar.engine.graphs import nodes_behind
from unipar.engine.outputs import tensors_of
from unipar.errors import ConfigError
from unipar.session import Session
from unipar.state import is_dtensor
from unipar.strategy import Engine

_LEADS_TO = "unipar.compat"
_OWN = ("module", "whole_shapes", "training_by", "begins_alike")
"""What is set on a prepared model itself, beside what begins so; all else is the module's."""
_PREFIX = "_unipar_"
_OF_MODULES = frozenset(dir(nn.Module))
"""Names that torch's class has."""


class Calls(NamedTuple):
    """The calls of a face that messages name; those of Accelerate unless a face says its own."""

    prepare: str = "accelerator.prepare"
    optimized: str = "model, optimizer = accelerator.prepare(model, optimizer)"
    backward: str = "accelerator.backward(loss)"
    clip: str = "accelerator.clip_grad_norm_"
    whole: str = "accelerator.get_state_dict(model), or accelerator.save_state(directory)"
    save: str = "accelerator.save_state(directory)"
    load: str = "load_state"
    unwrap: str = "accelerator.unwrap_model(model)"


class Training:
    """A model whose optimizer is known, and the engine that trains it.

    Args:
        engine: of the session.
        drop: drops the gradients that there are.

    Attributes:
        engine: of the session.
        drop: drops the gradients that there are.
        failed: whether a forward or a backward pass of this step has raised an error.
        shares_buffers: whether passes begin with rank 0's buffers where those of DDP do.
        called: whether the model was called for gradients since the last step.
        uses_alike: whether all ranks have used the same parameters in this step, as far as is seen.
        armed: whether DDP sums the gradients of the next backward pass over ranks.
        apart: whether the model was called so that it does not, since it last did.
    """

    def __init__(self, engine: Engine, drop: Callable[..., None]) -> None:
        self.engine, self.drop = engine, drop
        self.shares_buffers = self.failed = self.called = False
        self.armed = self.apart = False
        self.uses_alike = True

    def note_pass(self, *, syncs: bool) -> None:
        """Note a forward pass that may be trained on.

        Args:
            syncs: whether it is through DDP, and not within ``no_sync``. That of the backward pass
                does not count.
        """
        self.armed |= syncs
        self.apart |= not syncs

    @property
    def leaves_own(self) -> bool:
        """Whether the framework leaves the gradients of the next backward pass to each rank."""
        return self.apart and not self.armed

    def end_pass(self) -> None:
        """A backward pass has been."""
        if self.armed:
            self.armed = self.apart = False


class PreparedModel(nn.Module):
    """A model that is called as before, in the run's precision and with outputs in fp32.

    Names of parameters are the module's own. What else it has is found on it, too. Until an
    optimizer comes that trains it, it computes by itself, with rank 0's weights unless a face says
    otherwise.

    Args:
        module: the user's.
        session: the open one.
        half: the run's precision, if that is half.
        device: what it is moved to where it computes by itself; ``None``: it stays where it is.
        widens: whether outputs in half precision are converted to fp32.

    Attributes:
        module: the user's, as the strategy has made it.
        training_by: what trains it, once its optimizer is prepared.
        whole_shapes: of its parameters and buffers, as a whole.
        begins_alike: whether the face's framework has DDP around it, so that passes begin with
            rank 0's buffers where DDP's do, also while it computes by itself.
    """

    face_calls: ClassVar[Calls] = Calls()
    begins_alike: bool = False
    guards_module: ClassVar[bool] = True
    """Whether state dicts of the module itself are refused where they would be of parts."""

    def __init__(
        self,
        module: nn.Module,
        session: Session,
        *,
        half: torch.dtype | None,
        device: torch.device | None,
        widens: bool = True,
    ) -> None:
        super().__init__()
        self.module = module
        self.__dict__["training"] = module.training
        self.training_by: Training | None = None
        self._unipar_session, self._unipar_half, self._unipar_device = session, half, device
        self._unipar_widens = widens and half is not None
        self._unipar_shared, self._unipar_bare = False, None
        self._unipar_syncs, self._unipar_unsynced = True, False
        # Scripts may hold parameters from before the strategy puts others in their place.
        state = module.state_dict()
        self.whole_shapes = {k: v.shape for k, v in state.items() if isinstance(v, torch.Tensor)}
        self._unipar_names = {
            id(one): (weakref.ref(one), name) for name, one in module.named_parameters()
        }

    def name_of(self, parameter: torch.Tensor) -> str | None:
        """The name of a parameter, also of one from before the strategy had the model."""
        known, name = self._unipar_names.get(id(parameter), (None, None))
        return name if known is not None and known() is parameter else None

    def trained_by(self, engine: Engine, drop: Callable[..., None]) -> Training:
        """Compute by an engine from now on; see :class:`Training`."""
        self.module = engine.module
        for name, one in engine.module.named_parameters():
            self._unipar_names[id(one)] = weakref.ref(one), name
        self.training_by = Training(engine, drop)
        if self.guards_module:
            _guard(engine.module, self._unipar_session, self.face_calls)
        return self.training_by

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        training = self.training_by
        if training is None:
            self.share_weights()
        self._begin_pass()
        if training is None:
            output = self._by_itself(args, kwargs)
        else:
            if torch.is_grad_enabled():
                training.called = True
                training.note_pass(syncs=self.syncs)
            try:
                output = training.engine(*args, **kwargs)
            except BaseException:
                training.failed = True
                raise
        if self._unipar_widens:
            output = fp32(output)
        if (
            training is not None
            and torch.is_grad_enabled()
            and len(self._unipar_session.engines) > 1
        ):
            self._note(training, output, (args, kwargs))
        return output

    def _begin_pass(self) -> None:
        """Begin with rank 0's buffers where DDP's forward does (torch 2.13). Collective."""
        due = self._unipar_syncs
        self._unipar_syncs = torch.is_grad_enabled() and self.syncs
        if due:
            self.share_buffers()

    @property
    def syncs(self) -> bool:
        """Whether DDP would sum over ranks the gradients of a forward pass of now."""
        return not self._unipar_unsynced

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A block of passes whose gradients are left to each rank."""
        before, self._unipar_unsynced = self._unipar_unsynced, True
        try:
            with current.accumulating():
                yield
        finally:
            self._unipar_unsynced = before

    def share_buffers(self) -> None:
        """Take rank 0's buffers, if the script has replicas that do. Collective."""
        training = self.training_by
        if training is None:
            if self.begins_alike and current.may_share_buffers():
                share_buffers(self.module.buffers(), self._unipar_session.world)
        elif training.shares_buffers:
            assert isinstance(training.engine, StepEngine)
            training.engine.reducer.share_buffers()

    def own_buffers(self, *, from_start: bool) -> dict[str, torch.Tensor]:
        """Copies of the buffers that each rank is to keep where the strategy takes the model.

        Args:
            from_start: all that it comes with; else what ranks have made of those that they have
                had alike.
        """
        if not (from_start or self._unipar_shared):
            return {}
        return {name: one.detach().clone() for name, one in self.module.named_buffers()}

    def _by_itself(self, args: Any, kwargs: Any) -> Any:
        world = self._unipar_session.world
        with self._autocast():
            output = self.module(*args, **kwargs)
        if torch.is_grad_enabled() and world.size > 1:
            learns = any(one.requires_grad for one in self.module.parameters())
            for tensor in tensors_of(output) if learns else ():
                if tensor.requires_grad:
                    tensor.register_hook(self._refuse_untrained)
        return output

    def bare_module(self, *, in_half: bool) -> nn.Module:
        """The module itself.

        Args:
            in_half: whether it computes in the run's half precision, and gives fp32, where it is
                called by itself; not where the strategy has its weights in half precision.
        """
        if in_half and self._unipar_half is not None and self._unipar_bare is None:
            held, within = weakref.ref(self), self.module.forward

            def forward(*args: Any, **kwargs: Any) -> Any:
                own = held()
                if own is None or not own._is_bare():
                    return within(*args, **kwargs)
                with own._autocast():
                    return fp32(within(*args, **kwargs))

            self._unipar_bare = replace_forward(self.module, forward)
        elif not in_half and self._unipar_bare is not None:
            self._unipar_bare()
            self._unipar_bare = None
        return self.module

    def _is_bare(self) -> bool:
        """Whether it is called by itself, and by no engine."""
        engine = self.training_by.engine if self.training_by is not None else None
        by_autocast = not isinstance(engine, StepEngine) or engine.precision.autocasts
        return by_autocast and not torch.is_autocast_enabled(self._unipar_session.world.device.type)

    def _autocast(self) -> torch.autocast:
        device = self._unipar_session.world.device
        return torch.autocast(device.type, self._unipar_half, enabled=self._unipar_half is not None)

    def share_weights(self, *, parameters: bool = True, buffers: bool = True) -> None:
        """Move a model that computes by itself, and give it rank 0's weights, once. Collective.

        Args:
            parameters: whether its parameters are rank 0's.
            buffers: whether its buffers are.
        """
        if self._unipar_shared or self.training_by is not None:
            return
        self._unipar_shared = True
        world = self._unipar_session.world
        if self._unipar_device is not None:
            self.module.to(self._unipar_device)
        with own_randomness(world.device):
            shared = list[torch.Tensor](self.module.parameters() if parameters else ())
            broadcast_tensors([*shared, *(self.module.buffers() if buffers else ())], world)

    def _refuse_untrained(self, gradient: torch.Tensor) -> None:
        raise ConfigError(
            "a backward pass came to a model whose optimizer is not prepared: its gradients would "
            "not be summed over the ranks, and replicas would drift apart. Prepare the optimizer "
            f"too: {self.face_calls.optimized}."
        )

    def _note(self, training: Training, output: Any, inputs: Any) -> None:
        """Note on the output which models a loss of it would train."""
        found = led_to(tensors_of(inputs))
        if training not in found and any(one.requires_grad for one in self.module.parameters()):
            found = (*found, training)
        for tensor in tensors_of(output):
            node: Any = tensor.grad_fn
            if node is not None:
                node.metadata[_LEADS_TO] = found

    # -- the module's own ------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.training_by is None:
            self.module.zero_grad(set_to_none)
        else:
            self.training_by.drop(set_to_none=set_to_none, of=self.module.parameters())

    def train(self, mode: bool = True) -> PreparedModel:
        self.__dict__["training"] = mode
        self.module.train(mode)
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if (
            self.training_by is not None
            and "parameters" in self._unipar_session.capabilities.sharded
        ):
            raise _only_a_part("its state_dict()", self._unipar_session, self.face_calls)
        return self.module.state_dict(*args, **kwargs)

    def whole_state_dict(self) -> dict[str, Any]:
        """The module's state dict at full shapes. Collective where ranks divide it.

        Where they do, only rank 0 has it, and the others get an empty one.
        """
        training = self.training_by
        if training is None or "parameters" not in self._unipar_session.capabilities.sharded:
            return self.module.state_dict()
        world = self._unipar_session.world
        found = GatheredModel(training.engine, world, rank0_only=True).state_dict()
        return found if world.is_main else OnRank0()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if self.training_by is not None and self._unipar_session.capabilities.sharded:
            raise ConfigError(
                f"strategy '{self._unipar_session.strategy.name}' divides the run's state among "
                "ranks, so weights cannot be put into it here. Load them before "
                f"{self.face_calls.prepare}(model)."
            )
        return self.module.load_state_dict(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        # Torch notes on each module what hooks it has, and what it was compiled into.
        of_torch = name.startswith("_") and (name in vars(self) or name in _OF_MODULES)
        if name in _OWN or name.startswith(_PREFIX) or of_torch:
            super().__setattr__(name, value)
            return
        if name == "training":
            super().__setattr__(name, value)
        setattr(self.module, name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __deepcopy__(self, memo: Any) -> Any:
        """A model that computes by itself, as for an average of weights.

        Raises:
            ConfigError: the strategy divides the model.
        """
        if (
            self.training_by is not None
            and "parameters" in self._unipar_session.capabilities.sharded
        ):
            raise ConfigError(
                f"strategy '{self._unipar_session.strategy.name}' divides the model among ranks, "
                f"so a copy (deepcopy, AveragedModel) would hold a part. {self._averaging()}"
            )
        made = type(self)(
            copy.deepcopy(self.module, memo),
            self._unipar_session,
            half=self._unipar_half,
            device=None,
            widens=self._unipar_widens,
        )
        # Ranks have the same weights since the model is trained.
        made._unipar_shared = self._unipar_shared or self.training_by is not None
        return made

    def _averaging(self) -> str:
        """How to average the weights of a model that is divided."""
        if any(is_dtensor(one) for one in self.module.parameters()):
            return (
                f"For an average of weights, after {self.face_calls.prepare}: average = [p.detach()"
                ".clone() for p in model.parameters()], which is divided alike; p.data.copy_(a) "
                "evaluates with it."
            )
        return (
            f"Copy it before {self.face_calls.prepare}; and to average weights as it is trained, "
            "use a strategy that leaves parameters whole, such as ddp or zero2."
        )


def _only_a_part(what: str, session: Session, calls: Calls) -> ConfigError:
    return ConfigError(
        f"strategy '{session.strategy.name}' divides the model among ranks, so {what} here is "
        f"only a part. Call {calls.whole}, on all ranks, so outside of any 'if rank == 0'."
    )


def _guard(module: nn.Module, session: Session, calls: Calls) -> None:
    """Refuse state dicts of parts, and weights that are put into what has copies of them."""
    name, sharded = session.strategy.name, session.capabilities.sharded

    # The engine holds them, which is to hold no prepared model.
    def refuse_parts(module: Any, prefix: str, keep_vars: bool) -> None:
        if keep_vars:  # As engines look at their own.
            return
        raise _only_a_part(f"{calls.unwrap}.state_dict()", session, calls)

    def refuse_weights(*args: Any) -> None:
        raise ConfigError(
            f"strategy '{name}' divides the run's state among ranks, so weights cannot be put "
            f"into {calls.unwrap} here. Load them before {calls.prepare}."
        )

    if "parameters" in sharded:
        for one in module.modules():
            one.register_state_dict_pre_hook(refuse_parts)
    if sharded:
        module.register_load_state_dict_pre_hook(refuse_weights)


def marks_output(node: Any) -> bool:
    """Whether a node of a graph is the output of a model, as :func:`led_to` finds it."""
    return _LEADS_TO in node.metadata


def led_to(tensors: Iterable[torch.Tensor]) -> tuple[Training, ...]:
    """What trains the models that these tensors were computed by.

    It looks back from the tensors, up to the nearest outputs of models.

    Returns:
        Each once: first those that all of it came through, as a critic that judged real samples
        and a generator's; one whose output went into another before that one.
    """
    found: dict[Training, None] = {}
    common: set[Training] | None = None
    for node in nodes_behind((one.grad_fn for one in tensors), up_to=marks_output):
        if marks_output(node):
            noted = node.metadata[_LEADS_TO]
            found |= dict.fromkeys(noted)
            common = set(noted) if common is None else common & set(noted)
    return tuple(sorted(found, key=lambda one: one not in (common or ())))
