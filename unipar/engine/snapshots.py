"""What modules and other objects hold at some time, to be compared and put back.

It is found by attributes, and in containers, wherever these lead: meters, logs and metrics are
plain objects, however deep.
"""

from __future__ import annotations

import contextlib
import io
import logging
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from unipar.state import changes_of

PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
"""What never changes by itself, and is compared by its value."""
_CLOSED = (
    type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType,
    io.IOBase, logging.Logger, logging.Handler, torch.optim.Optimizer,
)  # fmt: skip
"""What is not looked into: code, what leads out of the process, and what engines have."""
_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
_MOST, _MOST_BYTES = 20_000, 1 << 30
"""Of objects and tensors that are looked at, and of copies of arrays and tensors."""
_NOTHING = "nothing"


class Change(NamedTuple):
    """What was there before and what is there after: plain values, tensors, or kinds of objects."""

    before: Any
    after: Any


class _Node(NamedTuple):
    """An object, and what it held: a list of items, a set, or a dict of items or attributes."""

    one: Any
    held: Any
    of_module: bool


class Snapshot:
    """What is reachable from some objects.

    Weights and buffers of modules among them are not, for these are known by name.

    Args:
        roots: by what their paths begin with.
        apart: tensors, and paths of attributes, that are left out.
        copies: whether it is to be put back, for which tensors and arrays are copied.

    Attributes:
        complete: whether there were not too many objects to look at all of them.
    """

    def __init__(
        self, roots: Mapping[str, Any], *, apart: Collection[Any] = (), copies: bool = True
    ) -> None:
        self.complete, self._bytes = True, 0
        self._nodes: dict[tuple[str, str], _Node] = {}
        self._arrays: dict[str, tuple[Any, Any, int]] = {}
        self._paths = {one for one in apart if isinstance(one, str)}
        named = {
            id(part): (f"{path}.{name}".strip("."), part)
            for path, root in roots.items() if isinstance(root, nn.Module)
            for name, part in root.named_modules()
        }  # fmt: skip
        self._known = named
        tensors = [one for one in apart if isinstance(one, torch.Tensor)]
        for _, part in named.values():
            tensors += [*part._parameters.values(), *part._buffers.values()]
        seen = {id(one) for one in tensors if one is not None}
        left = [one for one in roots.items() if id(one[1]) not in named]
        left += reversed(list(named.values()))
        with torch.no_grad():
            while left:
                path, one = left.pop()
                if id(one) in seen or (id(one) not in named and _is_closed(one)):
                    continue
                seen.add(id(one))
                if len(self._nodes) + len(self._arrays) >= _MOST:
                    self.complete = False
                    break
                if isinstance(one, (torch.Tensor, np.ndarray)):
                    copy = self._copy(one) if copies else None
                    version = changes_of(one) if isinstance(one, torch.Tensor) else 0
                    self._arrays[path] = one, copy, version
                else:
                    left += reversed(list(self._look_into(path, one)))

    def put_back(self) -> None:
        """Give all objects what they held."""
        for (_, kind), node in self._nodes.items():
            now = _held(node.one, kind)
            # Only what is another: there are containers that cannot be changed.
            if now is not None and not _same(now, node.held):
                with contextlib.suppress(AttributeError, TypeError):
                    _fill(node.one, kind, now, node.held)
        with torch.no_grad():
            for one, copy, _ in self._arrays.values():
                if isinstance(one, torch.Tensor):
                    if copy is not None and not _equal(one, copy):
                        # By `.data`, for graphs that have it to find no other version.
                        one.data.copy_(copy)
                elif copy is not None and one.flags.writeable:
                    one[...] = copy

    def changes(self, later: Snapshot) -> dict[str, Change]:
        """What is another in a later one, by paths; numbers that were computed anew are, too."""
        found: dict[str, Change] = {}
        nothing = _Node(None, None, of_module=False)
        for place in {**self._nodes, **later._nodes}:
            path, kind = place
            before, after = self._nodes.get(place, nothing), later._nodes.get(place, nothing)
            if _same(before.held, after.held):
                continue
            olds, news = _by_key(before.held), _by_key(after.held)
            if kind == "items" and len(olds) != len(news):
                found[f"{path}[]"] = Change(len(olds), len(news))
            for key in {**olds, **news}:
                old, new = olds.get(key, _NOTHING), news.get(key, _NOTHING)
                of_torch = key in _OF_TORCH and (before.of_module or after.of_module)
                if old is new or of_torch:
                    continue
                if isinstance(old, PLAIN) or isinstance(new, PLAIN):
                    at = _path(path, kind, key, 0)
                    if at not in self._paths:
                        found[at] = Change(_told(old), _told(new))
        with torch.no_grad():
            for path, (one, _, version) in later._arrays.items():
                old, copy, before = self._arrays.get(path, (None, None, 0))
                if old is not one:
                    found[path] = Change(_as_tensor(old), _as_tensor(one))
                elif version != before or (copy is not None and not _equal(one, copy)):
                    now = _as_tensor(one).detach().clone()
                    found[path] = Change(_as_tensor(copy), now)
        return found

    def _look_into(self, path: str, one: Any) -> Iterator[tuple[str, Any]]:
        known = id(one) in self._known
        for kind in ("items", "attributes"):
            held = _held(one, kind)
            if held is None:
                continue
            self._nodes[path, kind] = _Node(one, held, of_module=known)
            if isinstance(held, set):
                continue
            pairs = held.items() if isinstance(held, dict) else enumerate(held)
            for number, (key, value) in enumerate(pairs):
                if (known and key in _OF_TORCH) or type(value) in PLAIN:
                    continue
                at = _path(path, kind, key, number)
                # Modules of the roots have names of their own.
                if id(value) not in self._known and at not in self._paths:
                    yield at, value

    def _copy(self, one: Any) -> Any:
        """A copy, but of what cannot be written to, or read; or where there is too much."""
        if isinstance(one, np.ndarray):
            self._bytes += one.nbytes
            self.complete &= self._bytes <= _MOST_BYTES
            return one.copy() if self.complete else None
        # Weights are known by their versions.
        is_plain = type(one) is torch.Tensor and one.layout is torch.strided
        if not is_plain or one.is_meta or one.is_inference() or not _in_memory(one):
            return None
        self._bytes += one.numel() * one.element_size()
        return one.detach().clone() if self._bytes <= _MOST_BYTES else None


def _is_closed(one: Any) -> bool:
    return isinstance(one, (*PLAIN, *_CLOSED)) or type(one).__module__.startswith("unipar.")


def _held(one: Any, kind: str) -> Any:
    """What an object holds now; ``None`` if it can hold nothing of that kind."""
    if kind == "items":
        if isinstance(one, dict):
            return dict(dict.items(one))
        if isinstance(one, (list, tuple, deque)):
            return list(one)
        return set(one) if isinstance(one, (set, frozenset)) else None
    own, slots = getattr(one, "__dict__", None), _slots(type(one))
    held = {name: member.__get__(one) for name, member in slots.items() if _is_set(member, one)}
    return {**held, **own} if isinstance(own, dict) else held or None


_slots_of = weakref.WeakKeyDictionary[type, dict[str, Any]]()


def _slots(kind: type) -> dict[str, Any]:
    """What gives and takes attributes that are in no dict."""
    if kind not in _slots_of:
        _slots_of[kind] = {
            name: member
            for one in kind.__mro__ if "__slots__" in vars(one)
            for name, member in vars(one).items() if isinstance(member, types.MemberDescriptorType)
        }  # fmt: skip
    return _slots_of[kind]


def _is_set(member: Any, one: Any) -> bool:
    try:
        member.__get__(one)
    except AttributeError:
        return False
    return True


def _fill(one: Any, kind: str, now: Any, before: Any) -> None:
    if kind == "attributes":
        slots, own = _slots(type(one)), getattr(one, "__dict__", {})
        for key in now.keys() - before.keys():
            slots[key].__delete__(one) if key in slots else own.pop(key)
        for key, value in before.items():
            slots[key].__set__(one, value) if key in slots else own.update({key: value})
        return
    one.clear()
    if isinstance(before, dict):
        # A Counter's own update would count.
        for key, value in before.items():
            one[key] = value
    else:
        one.update(before) if isinstance(before, set) else one.extend(before)


def _same(one: Any, other: Any) -> bool:
    """Whether containers hold the very same objects."""
    if type(one) is not type(other) or len(one) != len(other):
        return False
    if isinstance(one, set):
        return {id(item) for item in one} == {id(item) for item in other}
    if isinstance(one, dict):
        return list(one) == list(other) and _same(list(one.values()), list(other.values()))
    return all(a is b for a, b in zip(one, other, strict=True))


def _by_key(held: Any) -> dict[Any, Any]:
    if held is None:
        return {}
    if isinstance(held, set):
        return {item: item for item in held if isinstance(item, PLAIN)}
    return held if isinstance(held, dict) else dict(enumerate(held))


def _path(path: str, kind: str, key: Any, number: int) -> str:
    if kind == "attributes":
        return f"{path}.{key}".lstrip(".")
    # Other keys may have any text, and need not have one.
    return f"{path}[{key!r}]" if isinstance(key, PLAIN) else f"{path}[#{number}]"


def _told(value: Any) -> Any:
    return value if isinstance(value, PLAIN) else type(value)


def _equal(one: Any, other: Any) -> bool:
    """Whether tensors or arrays have the same values."""
    if one.shape != other.shape:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _as_tensor(one: Any) -> Any:
    if not isinstance(one, np.ndarray):
        return one
    try:
        return torch.tensor(one)
    except TypeError:
        # Of texts or objects the values are compared by hand, as they are told.
        return repr(one.tolist())


def _in_memory(tensor: torch.Tensor) -> bool:
    # What shards parameters may leave a tensor without its memory.
    return tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0
