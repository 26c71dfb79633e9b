"""Models and optimizers as ``fabric.setup`` gives them back."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from unipar.compat.fabric.data import FabricDataLoader
from unipar.compat.fabric.strategies import Strategy
from unipar.compat.fabric_names import refuse
from unipar.compat.models import Calls, PreparedModel, Training
from unipar.compat.optimizers import PreparedOptimizer
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
    """A model that is called as before; methods of its own that compute have to be named."""

    calls: ClassVar[Calls] = _CALLS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._methods: set[str] = set(_STEPS)
        # On one process nothing is around the model, as in Fabric.
        self._divides = self._session.world.size > 1

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._half is not None:
            args, kwargs = tree_map_only(torch.Tensor, _single, (args, kwargs))
        return super().forward(*args, **kwargs)

    def trained_by(self, engine: Engine, drop: Callable[[], None]) -> Training:
        training = super().trained_by(engine, drop)
        if "parameters" in self._session.capabilities.sharded:
            # Held by the engine, which is to hold no model.
            this: Any = weakref.proxy(self)
            refuse_parts = functools.partial(FabricModule._refuse_parts, this)
            for one in engine.module.modules():
                one.register_state_dict_pre_hook(refuse_parts)
        return training

    def _refuse_parts(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if keep_vars:  # An engine's own.
            return
        raise ConfigError(
            f"strategy '{self._session.strategy.name}' divides the model among ranks, so "
            f"model.module.state_dict() here is only a part. Call {self.calls.whole}, on all ranks."
        )

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
        self._methods.add(name)

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        # What nn.Module itself has is found before this is asked.
        if name in self._methods and inspect.ismethod(found):
            return functools.partial(self._through_forward, found)
        if inspect.ismethod(found) and found.__self__ is self._modules["module"] and self._divides:
            return self._watched(found, name)
        return found

    def _through_forward(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        module: nn.Module = self.module

        def once(*given: Any, **named: Any) -> Any:
            # The method may call the model's own forward.
            module.__dict__.pop("forward", None)
            return method(*given, **named)

        module.__dict__["forward"] = once
        try:
            return self(*args, **kwargs)
        finally:
            module.__dict__.pop("forward", None)

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


def _single(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


class FabricOptimizer(PreparedOptimizer):
    """An optimizer that its model's engine steps, and that tells callbacks.

    Args:
        optimizer: the user's.
        session: the open one.
        may_skip: whether a step may leave the weights as they were.
        callbacks: of the Fabric.
        clears: whether the script has to clear gradients.
    """

    calls: ClassVar[Calls] = _CALLS

    def __init__(
        self,
        optimizer: Optimizer,
        session: Session,
        *,
        may_skip: bool,
        callbacks: list[Any],
        clears: bool,
    ) -> None:
        super().__init__(optimizer, session, accumulating=lambda: False, may_skip=may_skip)
        self._callbacks, self._clears = callbacks, clears
        self._stepped = self._mixed = self._partial = False
        self._value: float | None = None

    def takes_up(self, model: PreparedModel, **asked: Any) -> None:
        held = {model.name_of(p) for group in self.param_groups for p in group["params"]}
        named = model.module.named_parameters()
        self._partial = any(one.requires_grad and name not in held for name, one in named)
        super().takes_up(model, **asked)

    def _over(self, model: PreparedModel) -> Any:
        # An engine keeps it, and is to hold neither.
        this: Any = weakref.proxy(self)
        of: Any = weakref.proxy(model)
        return PreparedOptimizer._over(this, of)

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        self._mixed |= self._stepped

    def clip(self, max_norm: float, device: torch.device) -> torch.Tensor:
        if self._partial:
            raise ConfigError(
                "clip_gradients(max_norm=…): the optimizer has some of the model's parameters, and "
                "a strategy clips the gradient of the model as a whole. Set requires_grad=False on "
                "the others."
            )
        return super().clip(max_norm, device)

    def clip_value(self, value: float) -> None:
        """Have the next step clip each element of the gradient."""
        if not self.begun:
            raise ConfigError(
                "clip_gradients came before fabric.backward(loss). Call it between backward and "
                "optimizer.step()."
            )
        self._value = value

    def take_step(self) -> None:
        if self._mixed and self._clears:
            raise ConfigError(
                "optimizer.zero_grad() was not called since the last step: torch would add this "
                "gradient to the last one, and an engine has cleared that. Call zero_grad() once "
                "for each step."
            )
        value, self._value = self._value, None
        if value is None:
            super().take_step()
        else:
            self._clipped_step(value)
        self._stepped = True

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

    def drop(self) -> None:
        super().drop()
        self._stepped = self._mixed = False
        self._value = None

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().step(closure)
        for one in self._callbacks:
            hook = getattr(one, "on_after_optimizer_step", None)
            if callable(hook):
                hook(strategy=Strategy(), optimizer=self.optimizer)


def is_wrapped(obj: object) -> bool:
    """Whether Fabric has set up a model, an optimizer or a loader."""
    return isinstance(obj, (FabricModule, FabricOptimizer, FabricDataLoader))


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
