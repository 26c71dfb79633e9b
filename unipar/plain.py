"""State dicts as JSON values and back, without pickle and without loss.

Schedulers, scalers and parameter groups keep numbers, lists and small maps. JSON has no tuples and
no keys but strings, so maps with other keys are written as pairs, and reading takes the type of the
value that stands in the place now.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from unipar.errors import CheckpointError

_PAIRS = "__pairs__"


def to_json(value: Any, where: str) -> Any:
    """Return ``value`` in JSON types.

    Args:
        value: numbers, strings, tensors of one element, and lists, tuples and maps of them.
        where: what the value is, for the error.

    Raises:
        CheckpointError: something in it is none of these.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        return [to_json(item, where) for item in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: to_json(item, f"{where}.{key}") for key, item in value.items()}
        pairs = [[to_json(k, where), to_json(v, where)] for k, v in value.items()]
        return {_PAIRS: pairs}
    raise CheckpointError(
        f"{where} holds a {type(value).__name__}, which cannot be written without pickle. "
        "Keep only numbers, strings, lists and maps in it."
    )


def from_json(value: Any, like: Any = None) -> Any:
    """Undo :func:`to_json`, taking container types from ``like`` where it has the same shape."""
    if isinstance(value, dict):
        known = like if isinstance(like, Mapping) else {}
        if _PAIRS in value:
            pairs = {key: from_json(item, known.get(key)) for key, item in value[_PAIRS]}
            return Counter(pairs) if isinstance(like, Counter) else pairs
        return {key: from_json(item, known.get(key)) for key, item in value.items()}
    if isinstance(value, list):
        known = like if isinstance(like, (list, tuple)) else ()
        items = [from_json(v, known[i] if i < len(known) else None) for i, v in enumerate(value)]
        return tuple(items) if isinstance(like, tuple) else items
    if isinstance(like, torch.Tensor) and isinstance(value, (int, float)):
        return torch.full_like(like, value)
    return value
