"""Instances that compute by another ``forward`` for a while."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from unipar.engine.transforms import Undo

Forward = Callable[..., Any]


def replace_forward(module: nn.Module, forward: Forward) -> Undo:
    """Have this instance compute by another ``forward``, so that no parameter changes its name.

    Returns:
        What gives back the one that it had: its class's, or what a user, a framework or another
        layer of ours had set on the instance. What was put over it since stays. Calling it again
        does nothing.
    """
    replaced = _Replaced(module, forward)
    _REPLACED.add(replaced)
    vars(module)["forward"] = forward
    return replaced.undo


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
