"""Edits of JSON values such as a careless or hostile writer makes: well-formed, and often wrong."""

from __future__ import annotations

import copy
import json
import math
from random import Random
from typing import Any

HOSTILE: tuple[Any, ...] = (
    *(-1, -5, 0, 1, 2, 7, 8, 10**6, 10**10, 2**31, 2**53 + 1, 2**63, 2**64, 10**30),
    *(1e30, 0.5, -0.0, math.nan, math.inf, True, False, None, "", "x", "F16", "I32", "F64", "BOOL"),
    *("../outside/rank.safetensors", "/dev/zero", "/etc/hostname", "..", ".", "a\0b", "\ud800"),
    *([], {}, [[]], [1, [2]], {"a": {"b": 1}}, "0" * 16, "é" * 300, {"__pairs__": 3}),
    json.loads("[" * 60 + "]" * 60),
)
"""What stands in place of a value."""


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every container of a tree with every key or index in it."""
    found: list[tuple[Any, Any]] = []
    left = [tree]
    while left:
        holder = left.pop()
        if isinstance(holder, (dict, list)):
            keys = list(holder) if isinstance(holder, dict) else range(len(holder))
            found += [(holder, key) for key in keys]
            left += [holder[key] for key in keys]
    return found


def edit(tree: Any, random: Random, hostile: tuple[Any, ...] = HOSTILE) -> list[str]:
    """Change one to three places of ``tree``; what was done, in words."""
    done = []
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        found = places(tree)
        if not found:
            return done
        # By field first: most places are numbers deep inside tensors.
        names = sorted({str(key) for _, key in found if not isinstance(key, int)} | {"0"})
        name = random.choice(names)
        there = [place for place in found if str(place[1]) == name] or found
        holder, key = random.choice(there)
        change = random.choice(
            (_delete, _replace, _replace, _nudge, _swap, _repeat, _copy, _rename)
        )
        done.append(f"{change.__name__[1:]} {key}: {change(holder, key, found, random, hostile)}")
    return done


def _delete(holder: Any, key: Any, *_: Any) -> str:
    return f"{str(holder.pop(key))[:60]}"


def _replace(holder: Any, key: Any, found: Any, random: Random, hostile: tuple[Any, ...]) -> str:
    holder[key] = copy.deepcopy(random.choice(hostile))
    return f"{str(holder[key])[:60]}"


def _nudge(holder: Any, key: Any, found: Any, random: Random, hostile: tuple[Any, ...]) -> str:
    value = holder[key]
    if isinstance(value, bool):
        holder[key] = not value
    elif isinstance(value, (int, float)):
        holder[key] = value + random.choice((-1, 1, 4, 8, -8, value))
    elif isinstance(value, str) and value:
        at = random.randrange(len(value))
        holder[key] = value[:at] + random.choice("0aF_./") + value[at + 1 :]
    elif isinstance(value, list):
        random.shuffle(value)
    return f"{str(holder[key])[:60]}"


def _swap(holder: Any, key: Any, found: Any, random: Random, hostile: tuple[Any, ...]) -> str:
    other = random.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    holder[key], holder[other] = holder[other], holder[key]
    return str(other)


def _repeat(holder: Any, key: Any, found: Any, random: Random, hostile: tuple[Any, ...]) -> str:
    if isinstance(holder, list):
        holder.insert(random.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
    else:
        holder[f"{key}2"] = copy.deepcopy(holder[key])
    return ""


def _copy(holder: Any, key: Any, found: Any, random: Random, hostile: tuple[Any, ...]) -> str:
    """The value of the same field elsewhere: as likely as not it is possible there."""
    other, at = random.choice([place for place in found if place[1] == key])
    holder[key] = copy.deepcopy(other[at])
    return f"{str(holder[key])[:60]}"


def _rename(holder: Any, key: Any, found: Any, random: Random, hostile: tuple[Any, ...]) -> str:
    if isinstance(holder, dict):
        new = random.choice((f"{key}x", "", *holder))
        holder[new] = holder.pop(key)
        return str(new)
    return ""
