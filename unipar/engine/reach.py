"""What a user's functions and modules can reach and change, kept so that it can be put back."""

from __future__ import annotations

import functools
import io
import logging
import os
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from unipar.engine.writes import storages, written_by
from unipar.objective import Objective
from unipar.state import is_dtensor

_KNOWN = ("torch", "numpy", "unipar")
"""Packages whose own functions and objects are not looked into."""
_INSTALLED = {"site-packages", "dist-packages"}
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
    tensors, through any number of steps. Not what files, other processes or objects without
    attributes hold.

    Args:
        module: as a framework may have prepared it. Of what it has or hangs on it, hooks among
            them, installed packages are not looked into: they keep their own state.
        function: the user's.

    Attributes:
        repeatable: whether what was found can be put back, so that calling the functions again is
            as if they had not been called: ``False`` with iterators, generators of random numbers,
            files, and code that runs backward passes or talks to other ranks.
    """

    def __init__(self, module: nn.Module | None, function: Any = None) -> None:
        self.repeatable = True
        self._foreign = _is_installed
        self._seen: dict[int, Any] = {}
        self._cells: list[tuple[types.CellType, Any]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._held: list[tuple[Any, list[Any], list[int]]] = []
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._written: dict[int, torch.UntypedStorage] = {}
        self._search(module)
        # It may be the method of an installed package's object, which may count its calls.
        self._foreign = _is_known
        self._search(function)

    def put_back(self) -> None:
        """Give everything what it held."""
        for cell, value in self._cells:
            if value is not _EMPTY:
                cell.cell_contents = value
        for namespace, name, value in self._globals:
            namespace[name] = value
        for holder, before, ids in self._held:
            restore(holder, before, ids)
        for key, before in self._written.items():
            if self._storages[key].nbytes() == before.nbytes():
                self._storages[key].copy_(before)

    def watching(self) -> AbstractContextManager[Any]:
        """Surround what may change tensors: of those that it writes to, copies are kept."""
        return _Writes(self._about_to_write)

    def _about_to_write(self, value: Any) -> None:
        for key in self._storages.keys() & storages(value).keys() - self._written.keys():
            self._written[key] = self._storages[key].clone()

    def _search(self, root: Any) -> None:
        waiting = [root]
        while waiting and self.repeatable:
            one = waiting.pop()
            if id(one) in self._seen:
                continue
            # Held, so that no other object gets its id.
            self._seen[id(one)] = one
            waiting.extend(self._look_at(one))
            self.repeatable = self.repeatable and len(self._seen) < _MOST

    def _look_at(self, one: Any) -> Iterable[Any]:
        """Keep what an object holds, and return it."""
        if isinstance(one, types.FunctionType):
            return self._look_at_function(one)
        if isinstance(one, types.MethodType):
            if self._foreign(one.__func__):
                return ()
            return (
                *_methods(type(one.__self__), one.__func__.__name__),
                one.__func__,
                one.__self__,
            )
        if isinstance(one, functools.partial):
            return (one.func, one.args, one.keywords)
        if isinstance(one, torch.Tensor):
            if _has_memory(one):
                self._storages |= storages(one)
            return ()
        if isinstance(one, _MOVES):
            self.repeatable = False
            return ()
        if isinstance(one, (list, set, dict, deque)):
            self._keep(one)
        if isinstance(one, Mapping):
            return one.values()
        if isinstance(one, (list, set, deque, tuple, frozenset)):
            return one
        if isinstance(one, (type, types.ModuleType, logging.Logger)):
            return ()
        if not isinstance(one, (nn.Module, Objective)) and self._foreign(type(one)):
            return ()
        if isinstance(own := getattr(one, "__dict__", None), dict):
            self._keep(own)
            called = "forward" if isinstance(one, nn.Module) else "__call__"
            return (*_methods(type(one), called), *own.values())
        return ()

    def _look_at_function(self, function: types.FunctionType) -> Iterable[Any]:
        if self._foreign(function):
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

    def _keep(self, holder: Any) -> None:
        self._held.append((holder, contents(holder), ids(holder)))


class _Writes(TorchDispatchMode):
    """Tells of tensors that are about to be changed in place."""

    def __init__(self, tell: Callable[[Any], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in written_by(func, args, kwargs):
            self._tell(value)
        return func(*args, **kwargs)


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether its memory is known to be its own: a framework's type may have it elsewhere."""
    kinds = (torch.Tensor, nn.Parameter, nn.Buffer)
    strided = tensor.layout is torch.strided and not tensor.is_nested
    return (type(tensor) in kinds or is_dtensor(tensor)) and strided and not tensor.is_meta


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


def _methods(kind: type, name: str) -> list[types.FunctionType]:
    """A method of a class, and those of the same object that it may call, by their names."""
    waiting, looked_for = [name], set()
    found: list[types.FunctionType] = []
    while waiting:
        name = waiting.pop()
        if name in looked_for:
            continue
        looked_for.add(name)
        for one in kind.__mro__:
            method = vars(one).get(name)
            method = getattr(method, "__func__", method)
            if isinstance(method, types.FunctionType):
                found.append(method)
                waiting.extend(_names(method.__code__))
    return found


def _names(code: types.CodeType) -> set[str]:
    """Names of variables and attributes in a function, and in those within it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _is_known(one: Any) -> bool:
    """Whether a function or class is PyTorch's or of the like, and has no state to look for."""
    package, _, _ = (getattr(one, "__module__", None) or "").partition(".")
    return package in _KNOWN or package.startswith("unipar_")


def _is_installed(one: Any) -> bool:
    """Whether a function or class is of an installed package."""
    module = sys.modules.get(getattr(one, "__module__", None) or "")
    path = getattr(module, "__file__", None) or ""
    return _is_known(one) or not _INSTALLED.isdisjoint(path.split(os.sep))
