"""What a user's functions and modules can reach and change, kept so that it can be put back."""

from __future__ import annotations

import functools
import io
import random
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from unipar.objective import Objective

_FOREIGN = ("torch", "numpy", "unipar")
"""Packages whose own functions and objects are not looked into."""
_MOVES = (
    Iterator,
    io.IOBase,
    random.Random,
    np.random.Generator,
    np.random.RandomState,
    torch.Generator,
)
"""What gives something else each time, and cannot be set back."""
_TELLING = {"backward", "grad", "distributed"}
"""Names in code that leaves gradients, or talks to other ranks."""
_MOST = 50_000
"""Objects looked at. A search that has found more gives up."""
_EMPTY = object()


class Reach:
    """State that can be reached from some objects, as it was when this was made.

    Variables of closures and modules that functions name, attributes, lists, dicts, sets and
    tensors, through any number of steps. Not parameters that ranks divide, and not what files,
    other processes or objects without attributes hold.

    Args:
        roots: functions, modules and other objects.
        most_bytes: of tensors to keep copies of.

    Attributes:
        repeatable: whether what was found can be put back, so that calling the functions again is
            as if they had not been called: ``False`` with iterators, generators of random numbers,
            files, code that runs backward passes or talks to other ranks, or too many tensors.
    """

    def __init__(self, roots: Iterable[Any], most_bytes: int) -> None:
        self.repeatable = True
        self._left = most_bytes
        self._seen: dict[int, Any] = {}
        self._cells: list[tuple[types.CellType, Any]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._held: list[tuple[Any, list[Any], list[int]]] = []
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        waiting = list(roots)
        while waiting and self.repeatable:
            one = waiting.pop()
            if id(one) in self._seen:
                continue
            # Held, so that no other object gets its id.
            self._seen[id(one)] = one
            waiting.extend(self._look_at(one))
            self.repeatable = self.repeatable and len(self._seen) < _MOST

    def put_back(self) -> None:
        """Give everything what it held."""
        for cell, value in self._cells:
            if value is not _EMPTY:
                cell.cell_contents = value
        for namespace, name, value in self._globals:
            namespace[name] = value
        for holder, before, ids in self._held:
            restore(holder, before, ids)
        with torch.no_grad():
            for tensor, before in self._tensors:
                if tensor.shape == before.shape and not torch.equal(tensor, before):
                    tensor.copy_(before)

    def _look_at(self, one: Any) -> Iterable[Any]:
        """Keep what an object holds, and return it."""
        if isinstance(one, types.FunctionType):
            return self._look_at_function(one)
        if isinstance(one, types.MethodType):
            return () if _is_foreign(one.__func__) else (one.__func__, one.__self__)
        if isinstance(one, functools.partial):
            return (one.func, one.args, one.keywords)
        if isinstance(one, torch.Tensor):
            return self._look_at_tensor(one)
        if isinstance(one, _MOVES):
            self.repeatable = False
            return ()
        if isinstance(one, (list, set, dict, deque)):
            self._keep(one)
        if isinstance(one, Mapping):
            return one.values()
        if isinstance(one, (list, set, deque, tuple, frozenset)):
            return one
        if isinstance(one, (type, types.ModuleType)):
            return ()
        if not isinstance(one, (nn.Module, Objective)) and _is_foreign(type(one)):
            return ()
        if isinstance(own := getattr(one, "__dict__", None), dict):
            self._keep(own)
            return own.values()
        return ()

    def _look_at_function(self, function: types.FunctionType) -> Iterable[Any]:
        if _is_foreign(function):
            return ()
        found: list[Any] = [function.__defaults__, function.__kwdefaults__, function.__dict__]
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:
                value = _EMPTY
            self._cells.append((cell, value))
            found.append(value)
        for name in _names(function.__code__):
            if name in function.__globals__:
                value = function.__globals__[name]
                self._globals.append((function.__globals__, name, value))
                found.append(value)
            self.repeatable = self.repeatable and name not in _TELLING
        return found

    def _look_at_tensor(self, tensor: torch.Tensor) -> Iterable[Any]:
        # What is another type is of a framework, which may hold it elsewhere.
        if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer) or tensor.is_sparse:
            return ()
        self._left -= tensor.numel() * tensor.element_size()
        if self._left < 0:
            self.repeatable = False
        elif tensor.numel():
            self._tensors.append((tensor, tensor.detach().clone()))
        return ()

    def _keep(self, holder: Any) -> None:
        self._held.append((holder, contents(holder), ids(holder)))


def contents(holder: Any) -> list[Any]:
    """What a list, set, dict or deque holds; of a dict its pairs."""
    return list(holder.items() if isinstance(holder, dict) else holder)


def ids(holder: Any) -> list[int]:
    """The identities of :func:`contents`."""
    held = (*holder.keys(), *holder.values()) if isinstance(holder, dict) else holder
    return [id(one) for one in held]


def restore(holder: Any, before: list[Any], before_ids: list[int]) -> None:
    """Give it back what :func:`contents` and :func:`ids` found, if that is not what it holds."""
    # Only what is another: there are dicts that cannot be changed.
    if ids(holder) == before_ids:
        return
    holder.clear()
    if isinstance(holder, dict):
        # A Counter's own would count the pairs.
        dict.update(holder, before)
    else:
        holder.update(before) if isinstance(holder, set) else holder.extend(before)


def _names(code: types.CodeType) -> set[str]:
    """Names of variables and attributes in a function, and in those within it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _is_foreign(one: Any) -> bool:
    package, _, _ = (getattr(one, "__module__", None) or "").partition(".")
    return package in _FOREIGN or package.startswith("unipar_")
