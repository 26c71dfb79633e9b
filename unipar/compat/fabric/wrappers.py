"""Models and optimizers as ``fabric.setup`` gives them back."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from unipar.compat.fabric.data import FabricDataLoader
from unipar.compat.fabric.strategies import Strategy
from unipar.compat.fabric_names import refuse
from unipar.compat.fp32_outputs import cast
from unipar.compat.models import Calls, PreparedModel, Training
from unipar.compat.optimizers import PreparedOptimizer
from unipar.compat.tables import Table
from unipar.data.move import with_items
from unipar.engine import replace_forward
from unipar.errors import ConfigError
from unipar.session import Session
from unipar.state import is_dtensor
from unipar.strategy import Engine

_CALLS = Calls(
    prepare="fabric.setup",
    optimized="model, optimizer = fabric.setup(model, optimizer)",
    backward="fabric.backward(loss)",
    clip="fabric.clip_gradients",
    whole="fabric.save(path, {'model': model})",
    save="fabric.save(path, {'optimizer': optimizer})",
    load="fabric.load(path, state)",
    unwrap="model.module",
)
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
"""Methods of Lightning's modules that compute."""


class FabricModule(PreparedModel):
    """A model that is called as before; methods of its own that compute have to be named.

    Args:
        args: of a prepared model.
        true: the dtype of its weights and of all that it computes, if that is not fp32.
        wraps: whether Fabric puts something around the model, as it does but on one process.
        kwargs: of a prepared model.
    """

    face_calls: ClassVar[Calls] = _CALLS

    def __init__(
        self, *args: Any, true: torch.dtype | None = None, wraps: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._unipar_true, self._unipar_wraps = true, wraps
        self._unipar_methods: set[str] = set(_STEPS)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # As Fabric 2.6 does it; earlier versions give a model that computes in half fp32.
        taken = self._unipar_true or self._unipar_half
        if taken is None:
            return super().forward(*args, **kwargs)
        args, kwargs = cast((args, kwargs), taken)
        with default_dtype(self._unipar_true):
            output = super().forward(*args, **kwargs)
        if self._unipar_true is None:
            return output
        return cast(output, torch.get_default_dtype())

    def trained_by(self, engine: Engine, drop: Callable[..., None]) -> Training:
        groups = engine.optimizer.param_groups if engine.optimizer is not None else []
        stepped = {one.dtype for group in groups for one in group["params"]}
        if self._unipar_true is not None and stepped != {self._unipar_true}:
            raise ConfigError(
                f"strategy '{self._unipar_session.strategy.name}' steps by copies of the weights "
                f"in other precision than {self._unipar_true}. Use precision='bf16-mixed' or "
                "'32-true', or strategy ddp or fsdp."
            )
        return super().trained_by(engine, drop)

    def __deepcopy__(self, memo: Any) -> Any:
        made = super().__deepcopy__(memo)
        made._unipar_true, made._unipar_wraps = self._unipar_true, self._unipar_wraps
        made._unipar_methods = {*self._unipar_methods}
        return made

    def mark_forward_method(self, method: Any) -> None:
        """Let a method of the model's own lead to the engine, as ``model(...)`` does.

        Raises:
            ConfigError: the model has no such method.
        """
        name = method if isinstance(method, str) else method.__name__
        if name == "forward" or not inspect.ismethod(getattr(self.module, name, None)):
            raise ConfigError(
                f"mark_forward_method({name!r}): {type(self.module).__name__} has no such method "
                "beside forward. Name one that it has."
            )
        self._unipar_methods.add(name)

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        # What nn.Module itself has is found before this is asked.
        if name in self._unipar_methods and inspect.ismethod(found):
            return functools.partial(self._through_forward, found)
        of_model = inspect.ismethod(found) and found.__self__ is self._modules["module"]
        if of_model and self._unipar_wraps:
            return self._watched(found, name)
        return found

    def _through_forward(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        module: nn.Module = self.module

        def once(*given: Any, **named: Any) -> Any:
            # The method may call the model's own forward.
            give_back()
            if self._unipar_wraps or self._unipar_half is None:
                return method(*given, **named)
            # Nothing but the model's own forward computes in half then, and casts what it is given.
            with torch.autocast(self._unipar_session.world.device.type, enabled=False):
                return method(*args, **kwargs)

        give_back = replace_forward(module, once)
        try:
            return self(*args, **kwargs)
        finally:
            give_back()

    def _watched(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A method that is refused if it computes, which goes around the engine."""

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with _computing(self.module, name):
                return method(*args, **kwargs)

        return call


@contextmanager
def _computing(module: nn.Module, name: str) -> Iterator[None]:
    def refused(*args: Any) -> None:
        raise ConfigError(
            f"model.{name}() computes, and goes around the strategy, which sees model(...) alone. "
            f"Call model.mark_forward_method({name!r}) once, after fabric.setup."
        )

    handles = [one.register_forward_pre_hook(refused) for one in module.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Make tensors of a dtype where none is given; ``None`` changes nothing."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class FabricOptimizer(PreparedOptimizer):
    """An optimizer that its model's engine steps, and that tells callbacks.

    Args:
        optimizer: the user's.
        session: the open one.
        may_skip: whether a step may leave the weights as they were.
        callbacks: of the Fabric.
    """

    calls: ClassVar[Calls] = _CALLS

    def __init__(
        self,
        optimizer: Optimizer,
        session: Session,
        *,
        may_skip: bool,
        callbacks: list[Any],
    ) -> None:
        super().__init__(optimizer, session, accumulating=lambda: False, may_skip=may_skip)
        self._callbacks, self._partial = callbacks, False
        self._value: float | None = None

    def takes_up(self, model: PreparedModel, **asked: Any) -> None:
        super().takes_up(model, **asked)
        named = model.module.named_parameters()
        self._partial = any(one.requires_grad and name in self._left_out for name, one in named)

    @property
    def clips(self) -> bool:
        return super().clips or self._value is not None

    def clip(self, max_norm: float, device: torch.device) -> torch.Tensor:
        if not self._partial:
            return super().clip(max_norm, device)
        self._check_begun()
        if not self.lends_gradients:
            raise ConfigError(
                "clip_gradients(max_norm=…): the optimizer has some of the model's parameters, and "
                f"strategy '{self._session.strategy.name}' clips the gradient of the model as a "
                "whole. Set requires_grad=False on the others, or use a strategy that leaves "
                "gradients whole, such as ddp."
            )
        self.fetch_gradients()
        return nn.utils.clip_grad_norm_(self._updated(), max_norm)

    def _check_begun(self) -> None:
        if not self.begun:
            raise ConfigError(
                "clip_gradients came before fabric.backward(loss). Call it between backward and "
                "optimizer.step()."
            )

    def clip_value(self, value: float) -> None:
        """Clip each element of the gradient: now, where ranks have it whole, or in the step."""
        self._check_begun()
        if self.lends_gradients:
            self.fetch_gradients()
            nn.utils.clip_grad_value_(self._updated(), value)
        else:
            self._value = value if self._value is None else min(value, self._value)

    def take_step(self) -> None:
        value, self._value = self._value, None
        if value is None:
            super().take_step()
        else:
            self._clipped_step(value)

    def _clipped_step(self, value: float) -> None:
        """Clip what the optimizer is given, which is the gradient of the global batch by then."""
        clipped: list[Optimizer] = []

        def clip(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if getattr(optimizer, "grad_scale", None) is not None:
                raise ConfigError(
                    "clip_gradients(clip_val=…): a fused optimizer finds gradients scaled in fp16. "
                    "Use max_norm, bf16-mixed, or fused=False."
                )
            for group in optimizer.param_groups:
                for grad in (p.grad for p in group["params"] if p.grad is not None):
                    (grad.to_local() if is_dtensor(grad) else grad).clamp_(-value, value)
            clipped.append(optimizer)

        handle = self.optimizer.register_step_pre_hook(clip)
        try:
            super().take_step()
        finally:
            handle.remove()
        if not clipped and not self.step_was_skipped:
            raise ConfigError(
                f"clip_gradients(clip_val={value}): strategy '{self._session.strategy.name}' steps "
                "by an optimizer of its own. Use max_norm."
            )

    def drop(self, *, set_to_none: bool = True, of: Iterable[nn.Parameter] | None = None) -> None:
        super().drop(set_to_none=set_to_none, of=of)
        self._value = None

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for one in self._callbacks:
            hook = getattr(one, "on_after_optimizer_step", None)
            if callable(hook):
                hook(strategy=Strategy(), optimizer=self.optimizer)
        return loss


def is_wrapped(obj: object) -> bool:
    """Whether Fabric has set up a model, an optimizer or a loader."""
    return isinstance(obj, (FabricModule, FabricOptimizer, FabricDataLoader))


def _unwrap_objects(collection: Any) -> Any:  # pyright: ignore[reportUnusedFunction]
    """What Fabric has set up in a collection, as it was before.

    Lightning's own example of a trainer on Fabric imports it, though it is not public.
    """

    def unwrap(one: Any) -> Any:
        model = uncompiled(one)[0] if isinstance(one, nn.Module) else None
        if isinstance(model, FabricModule):
            return uncompiled(model.module)[0]
        if isinstance(one, FabricOptimizer):
            return one.optimizer
        if isinstance(one, FabricDataLoader):
            return vars(one)["_loader"]
        return with_items(one, unwrap)

    return unwrap(collection)


def uncompiled(module: nn.Module) -> tuple[nn.Module, bool | dict[str, Any]]:
    """A model without ``torch.compile``, and the arguments that it was compiled with."""
    if isinstance(module, torch._dynamo.OptimizedModule):
        return module._orig_mod, _COMPILED.get(module, True) or True
    return module, False


_COMPILED: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()
_compile = torch.compile


@functools.wraps(_compile)
def _noting(model: Any = None, *args: Any, **kwargs: Any) -> Any:
    if isinstance(model, FabricModule):
        refuse("torch.compile(fabric.setup(model))")
    compiled: Any = _compile(model, *args, **kwargs)
    if isinstance(model, nn.Module):
        _COMPILED[compiled] = kwargs
    return compiled


# As lightning_fabric does, for a compiled model does not say what it was compiled with.
torch.compile = _noting  # pyright: ignore[reportAttributeAccessIssue]

__getattr__ = Table("lightning_fabric.wrappers").refusing(__name__)
