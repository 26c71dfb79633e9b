"""Instances that compute by another ``forward`` for a while."""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from unipar.engine.transforms import Undo, last_first

Forward = Callable[..., Any]


def replace_forward(module: nn.Module, forward: Forward) -> Undo:
    """Have this instance compute by another ``forward``, so that no parameter changes its name.

    Copies of it compute by that of its class.

    Returns:
        What gives back the one that it had: its class's, or what a user, a framework or another
        layer of ours had set on the instance. What was put over it since stays. Calling it again
        does nothing.
    """
    own = _OfInstance(module, forward)
    replaced = _Replaced(module, own)
    _REPLACED.add(replaced)
    vars(module)["forward"] = own
    return replaced.undo


def compile_modules(modules: Iterable[nn.Module], setting: bool | dict[str, Any]) -> Undo:
    """Compile what each module computes, so that no parameter changes its name.

    Its hooks, which would break graphs, stay around it.
    """
    if setting is False:
        return lambda: None
    options: dict[str, Any] = {} if setting is True else setting
    return last_first([
        replace_forward(one, torch.compile(_inlined(one.forward), **options)) for one in modules
    ])  # fmt: skip


def _inlined(forward: Forward) -> Forward:
    # Frames of torch's own classes, as a Sequential is, are left out (torch 2.13,
    # _dynamo/trace_rules.py), but for what is called by one that is not.
    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return call


class _OfInstance:
    """A forward that is bound to one module, by whose weights a copy would compute else."""

    def __init__(self, module: nn.Module, forward: Forward) -> None:
        functools.update_wrapper(self, forward, updated=())
        self._module, self._forward = module, forward
        self._before: Forward | None = vars(module).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._module), self._module)
        return _of_copy(copied, copy.deepcopy(self._before, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_copy, (self._module, self._before)


def _of_copy(module: nn.Module, before: Forward | None) -> Forward:
    return before or types.MethodType(type(module).forward, module)


class _Replaced:
    def __init__(self, module: nn.Module, forward: Forward) -> None:
        self._module, self._forward = module, forward
        self._before: Forward | None = vars(module).get("forward")

    def undo(self) -> None:
        _REPLACED.discard(self)
        held = vars(self._module)
        if held.get("forward") is self._forward:
            if self._before is None:
                del held["forward"]
            else:
                held["forward"] = self._before
            return
        # Engines that share a module end in any order: the one that came next has nothing left to
        # give back but what was there before both.
        for other in _REPLACED:
            if other._module is self._module and other._before is self._forward:
                other._before = self._before


_REPLACED: weakref.WeakSet[_Replaced] = weakref.WeakSet()
