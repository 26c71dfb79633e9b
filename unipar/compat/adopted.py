"""A script's own module and optimizer, once an engine trains the one with the other."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from unipar.compat.gathering import GatheredModel, GatheredOptimizer
from unipar.compat.models import Calls, PreparedModel
from unipar.compat.optimizers import PreparedOptimizer
from unipar.errors import ConfigError
from unipar.world import World

_KEY = "_unipar"
_STATE = ("param_groups", "state", "defaults")
_CALLS = Calls(
    prepare="the first call of the model",
    optimized="build one optimizer over all parameters that are trained",
    backward="loss.backward()",
    clip="torch.nn.utils.clip_grad_norm_",
    whole="unipar.compat.torch.whole_state_dict(model)",
    save="unipar.compat.torch.save_state(directory)",
    load="unipar.compat.torch.load_state(directory)",
    unwrap="copy.deepcopy(model)",
)


class AdoptedModel(PreparedModel):
    """The engine's side of a module that stays where the script has it.

    Attributes:
        called: whether it was called since its last backward pass, so as to be trained.
    """

    _unipar_passes = True
    calls: ClassVar[Calls] = _CALLS
    guards_module: ClassVar[bool] = False
    called: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__["called"] = False

    @property
    def world(self) -> World:
        """The joined processes."""
        return self._session.world

    @property
    def learns(self) -> bool:
        """Whether a parameter of it is trained."""
        return any(one.requires_grad for one in self.module.parameters())

    @property
    def is_trained(self) -> bool:
        """Whether the script still has the optimizer that it was taken up with."""
        training = self.training_by
        return training is not None and training.engine in self._session.engines.values()

    @property
    def divided(self) -> bool:
        """Whether each rank has a part of the weights."""
        return "parameters" in self._session.capabilities.sharded

    def note(self, output: Any, inputs: Any) -> None:
        """Note on an output which models a loss of it would train."""
        if torch.is_grad_enabled() and self.training_by is not None:
            self.__dict__["called"] = self.training_by.called = True
            self._note(self.training_by, output, inputs)

    def gathered(self, *, rank0_only: bool = False) -> GatheredModel:
        """The whole of what ranks may have parts of."""
        assert self.training_by is not None
        return GatheredModel(self.training_by.engine, self.world, rank0_only=rank0_only)


class AdoptedOptimizer(PreparedOptimizer):
    """The engine's side of an optimizer that stays where the script has it.

    Attributes:
        uncleared: whether it has stepped, and gradients were not cleared since.
        summed: whether its steps are by the sum over ranks, and not by the mean.
    """

    calls: ClassVar[Calls] = _CALLS
    uncleared = summed = False

    @property
    def world(self) -> World:
        """The joined processes."""
        return self._session.world

    def take_over(self, model: AdoptedModel, **asked: Any) -> None:
        """:meth:`takes_up`, also with state from a file. Collective."""
        # Some strategies put other parameters, or fewer, into the groups.
        self._numbered = [
            [model.name_of(one) or "" for one in group["params"]]
            for group in self.optimizer.param_groups
        ]
        stored = self.optimizer.state_dict() if self.divided and self.optimizer.state else None
        if stored is not None:
            self.optimizer.state.clear()
        self.takes_up(model, **asked)
        if stored is not None:
            self.import_numbered(stored)

    @property
    def divided(self) -> bool:
        """Whether each rank has a part of the state."""
        return bool(self._session.capabilities.sharded & {"parameters", "optimizer"})

    def add(self, loss: torch.Tensor) -> None:
        """A backward pass of the script.

        Raises:
            ConfigError: gradients of the last step are there in PyTorch, and are not here.
        """
        if self.uncleared:
            raise ConfigError(
                "the optimizer has stepped, and gradients were not cleared since: PyTorch would "
                "add to those of the last step, which an engine has cleared. Call "
                "optimizer.zero_grad() before this loss.backward(); p.grad = None is not seen."
            )
        self.backward(loss)
        assert isinstance(self.model, AdoptedModel)
        self.model.__dict__["called"] = False

    def take_step(self) -> None:
        super().take_step()
        self.uncleared = True

    def drop(self) -> None:
        super().drop()
        self.uncleared = False

    # -- state, by the numbers of parameters, as PyTorch has it ----------------------------------

    def export_numbered(self) -> dict[str, Any]:
        """The whole state, whatever ranks divide. Collective."""
        found = self.gathered().state_dict()
        state = {
            number: found["state"][name] for number, name in enumerate(self._names())
            if name in found["state"]
        }  # fmt: skip
        groups, first = [], 0
        for group, names in zip(self.optimizer.param_groups, self._numbered, strict=True):
            groups.append({**group, "params": list(range(first, first + len(names)))})
            first += len(names)
        return {"state": state, "param_groups": groups}

    def import_numbered(self, stored: Mapping[str, Any]) -> None:
        """Take over whole state, by numbers or by the names of parameters. Collective."""
        names = self._names()

        def name(one: Any) -> str:
            return one if isinstance(one, str) else names[one]

        state = {name(one): values for one, values in stored.get("state", {}).items()}
        groups = [
            {**group, "params": [name(one) for one in group["params"]]}
            for group in stored.get("param_groups", ())
        ]
        self.gathered().load_state_dict({"state": state, "param_groups": groups} if groups else {})

    def gathered(self, *, rank0_only: bool = False) -> GatheredOptimizer:
        """The whole of what ranks may have parts of, by the names of parameters."""
        return GatheredOptimizer(self._known().engine, self.world, rank0_only=rank0_only)

    def _names(self) -> list[str]:
        return [name for names in self._numbered for name in names]


class _Module:
    """What is put before the class of a module that an engine trains."""

    _unipar_kind: type
    _unipar_adoption: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        adoption = self._unipar_adoption
        if adoption.inside:
            return super().__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        return adoption.compute(self.__dict__[_KEY], args, kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.__dict__[_KEY].zero_grad(set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        adoption = self._unipar_adoption
        model: AdoptedModel = self.__dict__[_KEY]
        if not model.divided or adoption.inside:
            return super().state_dict(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        adoption.refuse_parts("model.state_dict()")
        with adoption.engine_calls():
            found = model.gathered(rank0_only=adoption.rank0_only).state_dict()
        # A module around it hands these on.
        given = kwargs.get("destination")
        given = {} if given is None else given
        given.update({f"{kwargs.get('prefix', '')}{name}": one for name, one in found.items()})
        return given

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        adoption = self._unipar_adoption
        model: AdoptedModel = self.__dict__[_KEY]
        if not model.divided or adoption.inside:
            return super().load_state_dict(state_dict, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        adoption.refuse_parts("model.load_state_dict()")
        with adoption.engine_calls():
            return model.gathered().load_state_dict(state_dict)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Copies and files are of the script's own class.
        kept = {k: v for k, v in self.__dict__.items() if k not in (_KEY, "__deepcopy__")}
        return object.__new__, (self._unipar_kind,), kept


class _Optimizer:
    """What is put before the class of every optimizer that a script builds."""

    _unipar_kind: type
    _unipar_adoption: Any

    def own(self: Any) -> Optimizer:
        """An optimizer of the script's class with the same groups and state, for an engine."""
        made = object.__new__(self._unipar_kind)
        made.__dict__.update({k: v for k, v in self.__dict__.items() if k != "step"})
        return made

    def routed(self, adopted: AdoptedOptimizer) -> None:
        """Step by an engine from now on."""
        self.__dict__[_KEY] = adopted

    def step(self: Any, closure: Any = None) -> Any:
        adoption = self._unipar_adoption
        adopted: AdoptedOptimizer | None = self.__dict__.get(_KEY)
        if adopted is not None:
            with adoption.engine_calls():
                adopted.step(closure)
            return None
        adoption.check_alone(self)
        return super().step() if closure is None else super().step(closure)  # pyright: ignore[reportAttributeAccessIssue]

    step.hooked = True  # pyright: ignore[reportFunctionMemberAccess]

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        adopted: AdoptedOptimizer | None = self.__dict__.get(_KEY)
        if adopted is None:
            super().zero_grad(set_to_none)  # pyright: ignore[reportAttributeAccessIssue]
        else:
            adopted.zero_grad(set_to_none)

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        adopted: AdoptedOptimizer | None = self.__dict__.get(_KEY)
        if adopted is None:
            super().add_param_group(param_group)  # pyright: ignore[reportAttributeAccessIssue]
        else:
            adopted.add_param_group(param_group)

    def state_dict(self: Any) -> dict[str, Any]:
        adoption = self._unipar_adoption
        adopted: AdoptedOptimizer | None = self.__dict__.get(_KEY)
        if adopted is None:
            return super().state_dict()  # pyright: ignore[reportAttributeAccessIssue]
        if not adopted.divided:
            return adopted.optimizer.state_dict()
        adoption.refuse_parts("optimizer.state_dict()")
        with adoption.engine_calls():
            return adopted.export_numbered()

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        adoption = self._unipar_adoption
        adopted: AdoptedOptimizer | None = self.__dict__.get(_KEY)
        if adopted is None:
            super().load_state_dict(state_dict)  # pyright: ignore[reportAttributeAccessIssue]
        elif not adopted.divided and not _named_state(state_dict):
            adopted.optimizer.load_state_dict(state_dict)
        else:
            adoption.refuse_parts("optimizer.load_state_dict()")
            with adoption.engine_calls():
                adopted.import_numbered(state_dict)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        state = {key: getattr(self, key) for key in _STATE}
        return object.__new__, (self._unipar_kind,), state


def _named_state(state_dict: Mapping[str, Any]) -> bool:
    return any(isinstance(one, str) for one in state_dict.get("state", {}))


def _of_engine(name: str) -> property:
    """What an engine's optimizer has, once there is one."""

    def held(self: Any) -> dict[str, Any]:
        adopted: AdoptedOptimizer | None = self.__dict__.get(_KEY)
        return self.__dict__ if adopted is None else adopted.optimizer.__dict__

    def get(self: Any) -> Any:
        try:
            return held(self)[name]
        except KeyError:
            raise AttributeError(name) from None

    def put(self: Any, value: Any) -> None:
        held(self)[name] = value

    return property(get, put)


@functools.cache
def model_class(kind: type, original: type, adoption: Any) -> type:
    """The class of a module whose calls go to an engine.

    Args:
        kind: as the strategy has made it.
        original: as the script has it.
        adoption: what hands calls to engines.
    """
    return _named(original, (_Module, kind), {"_unipar_adoption": adoption})


@functools.cache
def optimizer_class(kind: type, adoption: Any) -> type:
    """The class of an optimizer whose steps go to an engine, once there is one.

    Args:
        kind: as the script has it.
        adoption: what hands calls to engines.
    """
    held = {name: _of_engine(name) for name in _STATE}
    return _named(kind, (_Optimizer, kind), {**held, "_unipar_adoption": adoption})


def _named(original: type, bases: tuple[type, ...], added: dict[str, Any]) -> type:
    told = {"__module__": original.__module__, "__qualname__": original.__qualname__,
            "__doc__": original.__doc__}  # fmt: skip
    return type(original.__name__, bases, {**told, **added, "_unipar_kind": original})
