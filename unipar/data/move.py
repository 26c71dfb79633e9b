"""Moving a batch to a device, whatever it is made of."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
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
        non_blocking: whether copies from page-locked memory may overlap with other work.
    """
    if isinstance(data, torch.Tensor):
        return data if data.device == device else data.to(device, non_blocking=non_blocking)
    if hasattr(data, "to"):
        # Before tuples and mappings: a PackedSequence and a tokenizer's batch know how to move.
        return data.to(device)
    if isinstance(data, (list, tuple)):
        moved = [move_to(item, device, non_blocking) for item in data]
        if all(new is old for new, old in zip(moved, data, strict=True)):
            return data
        return type(data)(*moved) if hasattr(data, "_fields") else type(data)(moved)
    if isinstance(data, Mapping):
        items = {key: move_to(item, device, non_blocking) for key, item in data.items()}
        if all(items[key] is item for key, item in data.items()):
            return data
        if type(data) is dict or not isinstance(data, MutableMapping):
            return items
        # A copy keeps what a subclass has besides its items, such as a default.
        copied = copy.copy(data)
        copied.update(items)
        return copied
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return _move_fields(data, device, non_blocking)
    return data


def _move_fields(data: Any, device: torch.device, non_blocking: bool) -> Any:
    copied = None
    for field in dataclasses.fields(data):
        old = getattr(data, field.name)
        new = move_to(old, device, non_blocking)
        if new is not old:
            copied = copy.copy(data) if copied is None else copied
            # Past a frozen dataclass's guard, which is meant for the original.
            object.__setattr__(copied, field.name, new)
    return data if copied is None else copied
