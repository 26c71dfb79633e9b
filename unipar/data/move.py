"""Moving a batch to a device, whatever it is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch


def move_to(data: Any, device: torch.device) -> Any:
    """Return ``data`` with every tensor in it on ``device``.

    Looks into lists, tuples, named tuples, mappings and dataclasses, and calls ``to`` on anything
    else that has it. What is on the device already is returned as it is.
    """
    if isinstance(data, torch.Tensor):
        return data if data.device == device else data.to(device, non_blocking=True)
    if isinstance(data, (list, tuple)):
        moved = [move_to(item, device) for item in data]
        if all(new is old for new, old in zip(moved, data, strict=True)):
            return data
        if hasattr(data, "_fields"):
            return type(data)(*moved)
        return type(data)(moved)
    if type(data) is dict:
        items = {key: move_to(item, device) for key, item in data.items()}
        return data if all(items[key] is item for key, item in data.items()) else items
    if hasattr(data, "to"):
        return data.to(device)
    if isinstance(data, Mapping):
        return {key: move_to(item, device) for key, item in data.items()}
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        values = {
            field.name: move_to(getattr(data, field.name), device)
            for field in dataclasses.fields(data)
        }
        return dataclasses.replace(data, **values)
    return data
