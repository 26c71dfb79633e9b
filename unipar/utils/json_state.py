"""State dicts as JSON values and back, without pickle and without loss.

Schedulers, scalers and parameter groups keep numbers, lists and small maps. JSON has no tuples and
no keys but strings, so maps with other keys are written as pairs, and reading takes the type of the
value that stands in the place now.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
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
    """Undo :func:`to_json`, taking container types from ``like`` where it has the same shape.

    Raises:
        CheckpointError: the value is none that :func:`to_json` gives.
    """
    if isinstance(value, dict):
        known = like if isinstance(like, Mapping) else {}
        if _PAIRS in value:
            pairs = {key: from_json(item, known.get(key)) for key, item in _pairs(value)}
            return Counter(pairs) if isinstance(like, Counter) else pairs
        return {key: from_json(item, known.get(key)) for key, item in value.items()}
    if isinstance(value, list):
        known = like if isinstance(like, (list, tuple)) else ()
        items = [from_json(v, known[i] if i < len(known) else None) for i, v in enumerate(value)]
        return tuple(items) if isinstance(like, tuple) else items
    if isinstance(like, torch.Tensor) and isinstance(value, (int, float)):
        return torch.full_like(like, value)
    return value


def _pairs(value: dict[str, Any]) -> list[tuple[Any, Any]]:
    pairs = value[_PAIRS]
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], Hashable)
        for pair in pairs
    ):
        raise CheckpointError(f"a stored map has {str(pairs)[:80]} for pairs of key and value.")
    return pairs


def check_like(value: Any, like: Any, where: str) -> None:
    """Hold that a stored value is of the kind of the one whose place it takes.

    Args:
        value: what is stored; ``None`` takes any place.
        like: what stands there now; anything takes the place of ``None``.
        where: what the value is, for the error.

    Raises:
        CheckpointError: it is a list instead of a number, say, or a tuple of another length.
    """
    kind, wanted = _kind(value), _kind(like)
    if None in (kind, wanted):
        return
    if kind != wanted or (isinstance(like, tuple) and len(value) != len(like)):
        raise CheckpointError(
            f"{where} is {str(value)[:60]} in the checkpoint ({kind}), and {str(like)[:60]} "
            f"({wanted}) in this run."
        )
    if isinstance(like, Mapping):
        for key, item in value.items():
            check_like(item, like.get(key), f"{where}.{key}")
    elif isinstance(like, (list, tuple)):
        for index, (item, own) in enumerate(zip(value, like, strict=False)):
            check_like(item, own, f"{where}.{index}")


def _kind(value: Any) -> str | None:
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, torch.Tensor):
        return "a number" if value.numel() == 1 else None
    kinds = (((int, float), "a number"), (str, "text"), ((list, tuple), "a list"))
    known = (*kinds, (Mapping, "a map"))
    return next((kind for types, kind in known if isinstance(value, types)), None)
