"""The classes of a script's own module and optimizer, whose calls go to an engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unipar.compat.adopted import AdoptedModel, AdoptedOptimizer
from unipar.compat.optimizers import runs_once
from unipar.compat.own_methods import run_own
from unipar.compat.run import current
from unipar.errors import ConfigError

_KEY = "_unipar"
_WITHIN = "_unipar_within"
_CLEARED = "_unipar_cleared"
_STATE = ("param_groups", "state", "defaults")
_OWN = {_KEY, _WITHIN, _CLEARED, *_STATE, "step"}


class _Module:
    """What is put before the class of a module that an engine trains."""

    _unipar_kind: type
    _unipar_adoption: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        adoption = self._unipar_adoption
        if adoption.inside:
            return super().__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        return adoption.compute(self.__dict__[_KEY], args, kwargs)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        clear = self.__dict__[_KEY].zero_grad
        run_own(self, self._unipar_kind, nn.Module, "zero_grad", clear, *args, **kwargs)

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

    def load_state_dict(self, state_dict: Any, strict: bool = True, **kwargs: Any) -> Any:
        adoption = self._unipar_adoption
        model: AdoptedModel = self.__dict__[_KEY]
        if not model.divided or adoption.inside:
            return super().load_state_dict(state_dict, strict, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        adoption.refuse_parts("model.load_state_dict()")
        with adoption.engine_calls():
            return model.gathered().load_state_dict(state_dict, strict=strict)

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
        adopted.cleared = self.__dict__.pop(_CLEARED, False)
        self.__dict__[_KEY] = adopted

    def given_back(self: Any) -> None:
        """Step by itself again."""
        adopted: AdoptedOptimizer = self.__dict__.pop(_KEY)
        self.__dict__.update({key: adopted.optimizer.__dict__[key] for key in _STATE})

    def routed_within(self, adopted: AdoptedOptimizer) -> None:
        """Have what this one steps by, which it holds, step by an engine from now on."""
        self.__dict__[_WITHIN] = adopted

    def step(self: Any, closure: Any = None) -> Any:
        adoption = self._unipar_adoption
        adopted: AdoptedOptimizer | None = self.__dict__.get(_KEY)
        if adopted is None and closure is not None and runs_once(self._unipar_kind):
            # It may be the first call of the model, by which an engine takes this optimizer over.
            with torch.enable_grad():
                loss = closure()
            self.step()
            return loss
        if adopted is not None:
            loss = adopted.run(closure)
            # What a class of the script's own has by itself, as a factor or a count, is of both.
            _share(self, adopted.optimizer)
            try:
                with adoption.engine_calls():
                    adopted.step()
            finally:
                _share(adopted.optimizer, self)
            return loss
        alone = _WITHIN not in self.__dict__
        if alone and closure is None and adoption.has_overflowed(self):
            return None
        if closure is None:
            if alone:
                adoption.check_alone(self)
            return super().step()  # pyright: ignore[reportAttributeAccessIssue]
        loss = super().step(closure)  # pyright: ignore[reportAttributeAccessIssue]
        if _KEY in self.__dict__ and current.placement().size > 1:
            raise ConfigError(
                f"optimizer.step(closure) of {self._unipar_kind.__name__} called the model for the "
                "first time, so that the optimizer has begun a step by itself that an engine was "
                "to take. Compute the loss and its gradients before, and call optimizer.step()."
            )
        if alone:
            # An engine may have taken it within.
            adoption.check_alone(self)
        return loss

    step.hooked = True  # pyright: ignore[reportFunctionMemberAccess]

    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        adopted: AdoptedOptimizer | None = self.__dict__.get(_KEY, self.__dict__.get(_WITHIN))
        if adopted is None:
            self.__dict__[_CLEARED] = True
            super().zero_grad(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        else:
            adopted.clear_as(self, self._unipar_kind, *args, **kwargs)

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        adopted: AdoptedOptimizer | None = self.__dict__.get(_KEY)
        if adopted is None:
            super().add_param_group(param_group)  # pyright: ignore[reportAttributeAccessIssue]
        else:
            adopted.add_param_group(param_group)
            adopted.number(param_group)

    def state_dict(self: Any) -> dict[str, Any]:
        adoption = self._unipar_adoption
        adopted: AdoptedOptimizer | None = self.__dict__.get(_KEY)
        if adopted is None:
            return super().state_dict()  # pyright: ignore[reportAttributeAccessIssue]

        def whole() -> dict[str, Any]:
            if not adopted.divided:
                return Optimizer.state_dict(adopted.optimizer)
            adoption.refuse_parts("optimizer.state_dict()")
            with adoption.engine_calls():
                return adopted.export_numbered()

        return _run_own_state(self, adopted, "state_dict", whole)

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        adoption = self._unipar_adoption
        adopted: AdoptedOptimizer | None = self.__dict__.get(_KEY)
        if adopted is None:
            super().load_state_dict(state_dict)  # pyright: ignore[reportAttributeAccessIssue]
            return

        def load(state_dict: dict[str, Any]) -> None:
            if not adopted.divided and not _named_state(state_dict):
                Optimizer.load_state_dict(adopted.optimizer, state_dict)
                return
            adoption.refuse_parts("optimizer.load_state_dict()")
            with adoption.engine_calls():
                adopted.import_numbered(state_dict)

        _run_own_state(self, adopted, "load_state_dict", load, state_dict)

    def __setstate__(self: Any, state: dict[str, Any]) -> None:
        adopted: AdoptedOptimizer | None = self.__dict__.get(_KEY)
        if adopted is None:
            super().__setstate__(state)  # pyright: ignore[reportAttributeAccessIssue]
            return
        # Torch's puts it into this one's dict, past the engine that steps by it.
        _share(self, adopted.optimizer)
        adopted.optimizer.__setstate__(state)
        _share(adopted.optimizer, self)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        state = {key: getattr(self, key) for key in _STATE}
        return object.__new__, (self._unipar_kind,), state


def engines_side(optimizer: Any) -> AdoptedOptimizer | None:
    """What steps what a script's optimizer updates, or holds, where an engine does."""
    own = getattr(optimizer, "__dict__", {})
    return own.get(_KEY, own.get(_WITHIN))


def steps_alone(optimizer: Any) -> bool:
    """Whether no engine steps what a script's optimizer updates."""
    return isinstance(optimizer, _Optimizer) and engines_side(optimizer) is None


def _run_own_state(
    optimizer: Any, adopted: AdoptedOptimizer, name: str, does: Callable[..., Any], *args: Any
) -> Any:
    """:func:`run_own`, refused where it leaves out what puts the parts of ranks together."""
    kind, called = optimizer._unipar_kind, []

    def noted(*args: Any) -> Any:
        called.append(name)
        return does(*args)

    found = run_own(optimizer, kind, Optimizer, name, noted, *args)
    if adopted.divided and not called:
        raise ConfigError(
            f"{kind.__name__}.{name}() does not call super().{name}(), and strategy "
            f"'{current.config.strategy if current.config else ''}' divides the optimizer's state "
            "among ranks, so that it is of one rank's part. Have it call that, or use a strategy "
            "that leaves state whole, such as ddp."
        )
    return found


def _named_state(state_dict: Mapping[str, Any]) -> bool:
    return any(isinstance(one, str) for one in state_dict.get("state", {}))


def _of_engine(name: str) -> property:
    """What an engine's optimizer has, once there is one."""

    def get(self: Any) -> Any:
        adopted: AdoptedOptimizer | None = self.__dict__.get(_KEY)
        if adopted is not None:
            return getattr(adopted, name)
        try:
            return self.__dict__[name]
        except KeyError:
            raise AttributeError(name) from None

    def put(self: Any, value: Any) -> None:
        adopted: AdoptedOptimizer | None = self.__dict__.get(_KEY)
        if adopted is None:
            self.__dict__[name] = value
        elif name == "state":
            adopted.state = value
        else:
            adopted.optimizer.__dict__[name] = value

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


def _share(one: Any, other: Any) -> None:
    """Give an optimizer the attributes of another, but what is each one's own."""
    other.__dict__.update(
        (key, value) for key, value in one.__dict__.items()
        if key not in _OWN and not callable(value)
    )  # fmt: skip


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
