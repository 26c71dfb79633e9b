"""Positions of a JSON document's values in its text."""

from __future__ import annotations

import json
from collections.abc import Iterator

Span = tuple[int, int]
"""First character, and the character after the last."""

_SPACE = " \t\r\n"
_DECODER = json.JSONDecoder()


def members(text: str, at: int) -> dict[str, Span]:
    """The values of the object that begins at a character, by their names."""
    found: dict[str, Span] = {}
    at = _skip(text, _skip(text, at) + 1)
    while text[at] != "}":
        name, at = _DECODER.raw_decode(text, at)
        start = _skip(text, _skip(text, at) + 1)
        _, at = _DECODER.raw_decode(text, start)
        found[name] = (start, at)
        at = _skip(text, at)
        at = _skip(text, at + 1) if text[at] == "," else at
    return found


def elements(text: str, at: int) -> Iterator[Span]:
    """The elements of the array that begins at a character."""
    at = _skip(text, _skip(text, at) + 1)
    while text[at] != "]":
        _, end = _DECODER.raw_decode(text, at)
        yield at, end
        at = _skip(text, end)
        at = _skip(text, at + 1) if text[at] == "," else at


def _skip(text: str, at: int) -> int:
    while text[at] in _SPACE:
        at += 1
    return at
