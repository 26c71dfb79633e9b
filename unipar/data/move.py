"""Moving a batch to a device, whatever it is made of."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch


def move_to(data: Any, device: torch.device, non_blocking: bool = True) -> Any:
    """Return ``data`` with every tensor in it on ``device``.

    Looks into lists, tuples, named tuples, mappings and dataclasses, and calls ``to`` on anything
    else that has it. What is on the device already is returned as it is; containers are not
    changed but copied.

    Args:
        data: a batch.
        device: with its index, as a tensor on it would say (``cuda:0``, not ``cuda``).
        non_blocking: whether copies to a device may overlap with other work. Copies to the host
            are always waited for: torch gives page-locked memory back before it is filled, and
            whoever reads it knows of no event to wait for.
    """
    non_blocking = non_blocking and device.type != "cpu"

    def move(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return part if part.device == device else part.to(device, non_blocking=non_blocking)
        if hasattr(part, "to"):
            # Before tuples and mappings: a PackedSequence and a tokenizer's batch know how to move.
            chosen = {"non_blocking": non_blocking} if _chooses_blocking(type(part)) else {}
            return part.to(device, **chosen)
        return with_items(part, move)

    return move(data)


def pinned(data: Any) -> Any:
    """Return ``data`` with its tensors in page-locked memory, from which a GPU copies by itself.

    Looks where :func:`move_to` does, also into containers that know how to move, but for those that
    know how to pin; containers are not changed but copied.
    """

    def pin(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return part.pin_memory() if _is_plain(part) and part.device.type == "cpu" else part
        if hasattr(part, "pin_memory"):
            return part.pin_memory()
        if isinstance(part, Mapping) and hasattr(part, "to"):
            # That of transformers' BatchEncoding changes the object itself, as of 5.23.
            part = copy.copy(part)
        return with_items(part, pin)

    return pin(data)


def can_be_recorded(data: Any, device: torch.device) -> bool:
    """Return whether :func:`record_stream` covers all memory that :func:`move_to` makes.

    And whether ``data`` comes from the host: then only the caller's stream has to be waited for.
    """

    def known(part: Any) -> bool:
        if isinstance(part, torch.Tensor):
            return _is_plain(part) and part.device in (torch.device("cpu"), device)
        return hasattr(part, "record_stream") or not hasattr(part, "to")

    return all(known(part) for part in _parts(data))


def record_stream(data: Any, stream: torch.Stream) -> None:
    """Keep the memory of ``data`` from being used again before ``stream`` has come so far."""
    for part in _parts(data):
        on_host = isinstance(part, torch.Tensor) and part.device.type == "cpu"
        if hasattr(part, "record_stream") and not on_host:
            part.record_stream(stream)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its memory is all its own: not of a sparse or nested one, or of others in it."""
    kinds: list[Any] = [type(tensor), torch.Tensor]
    own, usual = (kind.__torch_dispatch__ for kind in kinds)
    return tensor.layout is torch.strided and not tensor.is_nested and own is usual


@functools.cache
def _chooses_blocking(kind: type) -> bool:
    try:
        return "non_blocking" in inspect.signature(kind.to).parameters  # pyright: ignore[reportAttributeAccessIssue]
    except (TypeError, ValueError, AttributeError):
        return False


def _parts(data: Any) -> Iterator[Any]:
    """Yield the contents of the containers that ``data`` is made of."""
    if hasattr(data, "record_stream"):
        yield data
    elif isinstance(data, (list, tuple)):
        for item in data:
            yield from _parts(item)
    elif isinstance(data, Mapping):
        for item in data.values():
            yield from _parts(item)
    elif dataclasses.is_dataclass(data) and not isinstance(data, type):
        for field in dataclasses.fields(data):
            yield from _parts(getattr(data, field.name))
    else:
        yield data


def with_items(data: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container with its items changed; itself, if none is another object by that."""
    if isinstance(data, (list, tuple, deque)):
        items = [change(item) for item in data]
        if all(new is old for new, old in zip(items, data, strict=True)):
            return data
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    if isinstance(data, Mapping):
        items = {key: change(item) for key, item in data.items()}
        if all(items[key] is item for key, item in data.items()):
            return data
        if type(data) is dict or not isinstance(data, MutableMapping):
            return items
        # A copy keeps what a subclass has besides its items, such as a default.
        copied = copy.copy(data)
        # One by one: transformers' outputs, whose items are attributes too, have no update().
        for key, item in items.items():
            copied[key] = item
        return copied
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return _with_changed_fields(data, change)
    return data


def _with_changed_fields(data: Any, change: Callable[[Any], Any]) -> Any:
    copied = None
    for field in dataclasses.fields(data):
        old = getattr(data, field.name)
        new = change(old)
        if new is not old:
            copied = copy.copy(data) if copied is None else copied
            # Past a frozen dataclass's guard, which is meant for the original.
            object.__setattr__(copied, field.name, new)
    return data if copied is None else copied
