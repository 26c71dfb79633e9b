"""Merging of sources of config: file, environment, flags, arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unipar.errors import ConfigError
from unipar.launchers import registry as launchers
from unipar.optimizers.groups import is_groups
from unipar.strategy.registry import as_mapping

_EXCLUSIVE = (("epochs", "steps"),)
"""Keys of which one takes the other's place: ``--steps 10`` beats a file's ``epochs: 3``."""


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` laid over ``under``: mappings key by key, everything else as a whole.

    A mapping without ``name`` or ``target`` adds to what is named below it, whether that was
    written short or long: ``optimizer: adamw`` under ``optimizer: {lr: 0.1}`` gives both. One that
    names something replaces what it lies on, options and all; so do groups of optimizers what is
    one.
    """
    merged = dict(under)
    for pair in _EXCLUSIVE:
        if any(over.get(key) is not None for key in pair):
            for key in pair:
                merged.pop(key, None)
    for key, value in over.items():
        merged[key] = _merge_value(key, merged.get(key), value)
    return merged


def _merge_value(key: str, under: Any, over: Any) -> Any:
    if not isinstance(over, Mapping):
        return over
    expand = _SHORTHANDS.get(key)
    if expand is not None and under is not None and not isinstance(under, Mapping):
        under = expand(under)
    if not isinstance(under, Mapping) or "name" in over or "target" in over:
        return dict(over)
    if key == "optimizer" and is_groups(over) and not is_groups(under):
        return dict(over)
    return merge(under, over)


def _named(value: Any) -> Any:
    if isinstance(value, str):
        return {"target": value} if ":" in value else {"name": value}
    return value


def _target(value: Any) -> Any:
    return {"target": value} if isinstance(value, str) else value


def _checkpoint(value: Any) -> Any:
    if isinstance(value, bool):
        return {}
    return {"directory": value} if isinstance(value, (str, Path)) else value


_SHORTHANDS: dict[str, Callable[[Any], Any]] = {
    "strategy": as_mapping,
    "launcher": launchers.as_mapping,
    "optimizer": _named,
    "lr_scheduler": _named,
    "checkpoint": _checkpoint,
    **dict.fromkeys(("model", "data", "eval_data", "loss", "predict"), _target),
}


def set_dotted(values: dict[str, Any], key: str, value: Any) -> None:
    """Set ``key`` (``"checkpoint.keep_last"``) in nested mappings, making those that are missing.

    Raises:
        ConfigError: the key has an empty part, or passes through something that is no mapping.
    """
    *parents, last = key.split(".")
    if not all([*parents, last]):
        raise ConfigError(f"'{key}' is not a key: write it like checkpoint.keep_last.")
    for depth, part in enumerate(parents, 1):
        inner = values.get(part)
        if inner is None:
            inner = {}
        elif not isinstance(inner, Mapping):
            expand = _SHORTHANDS.get(part) if depth == 1 else None
            inner = expand(inner) if expand else inner
        if not isinstance(inner, Mapping):
            raise ConfigError(
                f"'{key}' cannot be set: '{'.'.join(parents[:depth])}' is already {inner!r}."
            )
        values[part] = inner = dict(inner)
        values = inner
    values[last] = value
