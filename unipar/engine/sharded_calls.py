"""Calls of modules that FSDP2 has sharded: what it copies of their inputs, what it does not see.

What goes into a module it casts, and puts a node of autograd before; containers of such tensors it
builds again (torch 2.13, distributed/fsdp/_fully_shard/_fsdp_state.py, ``_pre_forward``). A module
that writes into a list or dict that it was given would write into that copy. Of what a module
gives, it sees the tensors in a few classes of containers.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import (
    Callable,
    Iterable,
    Mapping,
    MutableMapping,
    MutableSequence,
    MutableSet,
    Sequence,
)
from typing import Any

import torch
from torch import nn

from unipar.engine.outputs import tensors_of
from unipar.engine.trail import Trail
from unipar.errors import ConfigError
from unipar.state import changes_of

_FLAT = (torch.Tensor, int, float, str, type(None))


def see_calls(
    root: nn.Module, strategy: str, trail: Trail | None = None
) -> list[Callable[[], None]]:
    """Let sharded modules write into what they are given, and FSDP2 see all backward passes.

    It hooks the tensors that it finds in an output. One in an object of another class than a few it
    does not find, nor one that a module has written into an input; and where a view is changed in
    place, the hook stays behind, so the tensor that it is a view of is hooked (torch 2.13,
    distributed/fsdp/_fully_shard/_fsdp_state.py, ``_register_pre_backward_hook``).

    Args:
        root: what ``fully_shard`` was called for, with all parts of it that it was called for.
        strategy: as the user calls it.
        trail: where to note the calls, if all ranks make the same.

    Returns:
        What takes that back.
    """
    # Importing it takes as long as torch, and only what shards needs it.
    from torch.distributed.fsdp import FSDPModule

    # It warns of what is put right here.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    undo: list[Callable[[], None]] = []
    for name, part in root.named_modules():
        if isinstance(part, FSDPModule):
            said = f"module '{name}'" if name else "the model"
            noting = None if trail is None else trail.entering(name)
            undo += _Calls(part, f"{strategy}: {said}", noting).install()
    return undo


class _Calls:
    """Calls of one module; of several at once where it calls itself."""

    def __init__(self, module: Any, said: str, note: Callable[[], None] | None) -> None:
        self._module, self._said, self._note = module, said, note
        self._running: list[_Call] = []

    def install(self) -> list[Callable[[], None]]:
        hooks = self._module._forward_pre_hooks
        # torch 2.13, distributed/fsdp/_fully_shard/_fsdp_state.py, init: one for each module of a
        # group.
        handle = self._module._get_fsdp_state()._pre_forward_hook_handle
        handles = {one.id for one in getattr(handle, "handles", (handle,))}
        key = next(key for key in hooks if key in handles)
        original = hooks[key]

        def enter(module: Any, args: Any, kwargs: Any) -> Any:
            if self._note is not None:
                self._note()
            call = _Call((*args, *kwargs.values()))
            self._running.append(call)
            got = original(module, args, kwargs)
            call.gets((*got[0], *(got[1][name] for name in kwargs)))
            return got

        hooks[key] = torch.compiler.disable(enter)
        leave: Any = torch.compiler.disable(self._leave)
        # First, while the output is what the module gave: FSDP casts it. After an error, too, so
        # that no call is taken for the next one.
        hooked = self._module.register_forward_hook(leave, prepend=True, always_call=True)
        return [lambda: hooks.__setitem__(key, original), hooked.remove]

    def _leave(self, module: Any, args: Any, output: Any) -> None:
        if not self._running:
            # An error in a hook that comes before all of these.
            return
        call = self._running.pop()
        call.write_back(self._said)
        if torch.is_grad_enabled():
            call.see(output, module._get_fsdp_state()._pre_backward)


class _Call:
    """What a module was given in one call, and what it got in its place."""

    def __init__(self, given: tuple[Any, ...]) -> None:
        self._given = given
        # As nearly always, and then there is nothing to look through.
        self._flat = all(isinstance(one, _FLAT) for one in given)
        # What came in is used by others, too, whose backward passes are not this module's.
        self._came: dict[int, tuple[torch.Tensor, Any]] = {}
        if torch.is_grad_enabled():
            self._know(self._inputs())
        self._copies: list[tuple[Any, Any, dict[Any, Any]]] = []
        self._cast: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self._given_for: dict[int, Any] = {}

    def _inputs(self) -> Iterable[torch.Tensor]:
        if self._flat:
            return [one for one in self._given if isinstance(one, torch.Tensor)]
        return tensors_of(self._given)

    def gets(self, got: tuple[Any, ...]) -> None:
        for given, copy in zip(self._given, got, strict=True):
            self._pair(given, copy)

    def write_back(self, said: str) -> None:
        """Do to what was given what the module has done to its copies.

        Raises:
            ConfigError: it has several of one container, and has written into one of them.
        """
        for given, copy, version in self._cast:
            if changes_of(copy) != version:
                given.copy_(copy)
        if self._flat:
            return
        copied = [id(given) for given, _, _ in self._copies]
        for given, copy, before in self._copies:
            now = _contents(copy)
            if _same(now, before):
                continue
            if copied.count(id(given)) > 1:
                raise ConfigError(
                    f"{said} is given one {type(given).__name__} twice, and writes into it. FSDP "
                    "gives it a copy of each, of which the other one does not know. Give it once."
                )
            _fill(given, {key: self._given_for.get(id(one), one) for key, one in now.items()})

    def see(self, output: Any, seen: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Hook the tensors of a module's, besides FSDP's own hooks: a second one does nothing."""
        known: set[int] = set()
        for tensor in (*tensors_of(output), *self._inputs()):
            base = tensor._base
            # A view that a function of autograd has made in its forward is the first to have one.
            one = tensor if base is None or not base.requires_grad else base
            if not one.requires_grad or id(one) in known or isinstance(one, nn.Parameter):
                continue
            came = self._came.get(id(one))
            if came is None or came[1] is not one.grad_fn:
                known.add(id(one))
                one.register_hook(seen)

    def _know(self, tensors: Any) -> None:
        for tensor in tensors:
            for one in (tensor, tensor._base):
                if one is not None:
                    self._came.setdefault(id(one), (one, one.grad_fn))

    def _pair(self, given: Any, copy: Any) -> None:
        if copy is given:
            return
        self._given_for[id(copy)] = given
        if isinstance(copy, torch.Tensor):
            self._know((copy,))
            # What has another dtype or device is no view of what was given.
            if given.dtype != copy.dtype or given.device != copy.device:
                self._cast.append((given, copy, changes_of(copy)))
            return
        inside = _contents(copy)
        for key, item in _contents(given).items():
            if key in inside:
                self._pair(item, inside[key])
        self._copies.append((given, copy, inside))


def _contents(data: Any) -> dict[Any, Any]:
    if isinstance(data, MutableSet):
        return {id(item): item for item in data}
    if dataclasses.is_dataclass(data):
        fields = {one.name: getattr(data, one.name) for one in dataclasses.fields(data)}
        return {**fields, **getattr(data, "__dict__", {})}
    if isinstance(data, Mapping):
        return dict(data)
    if isinstance(data, (Sequence, MutableSequence)):
        return dict(enumerate(data))
    return dict(getattr(data, "__dict__", {}))


def _same(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    return list(one) == list(other) and all(one[key] is other[key] for key in one)


def _fill(data: Any, contents: Mapping[Any, Any]) -> None:
    if dataclasses.is_dataclass(data) or not isinstance(
        data, (MutableMapping, MutableSequence, MutableSet)
    ):
        for name, value in contents.items():
            if getattr(data, name, None) is not value:
                setattr(data, name, value)
        return
    data.clear()
    if isinstance(data, MutableMapping):
        data.update(contents)
    elif isinstance(data, MutableSequence):
        data.extend(contents.values())
    else:
        for item in contents.values():
            data.add(item)
