"""Replacing pieces of a file, and nothing else in it."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

Span = tuple[int, int]
"""First byte, and the byte after the last."""


class Edits:
    """Replacements in one file. A replacement may quote parts of the file, which are edited too.

    Args:
        data: the file.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._parts: dict[Span, tuple[str | Span, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self._parts)

    def replace(self, span: Span, *parts: str | Span) -> None:
        """Put text, and quoted spans within ``span``, in place of it.

        Of two replacements of one span, the second goes around the first where it quotes the span,
        and is left out where it does not.
        """
        old = self._parts.get(span)
        if old is None:
            self._parts[span] = parts
        elif span in parts:
            at = parts.index(span)
            self._parts[span] = (*parts[:at], *old, *parts[at + 1 :])

    def covers(self, span: Span) -> bool:
        """Return whether this very span is replaced."""
        return span in self._parts

    def result(self) -> bytes:
        """The edited file."""
        spans = sorted(self._parts, key=lambda span: (span[0], -span[1]))
        return self._render((0, len(self.data)), spans)

    def _render(self, whole: Span, spans: Sequence[Span]) -> bytes:
        pieces: list[bytes] = []
        at = whole[0]
        first = bisect.bisect_left(spans, whole[0], key=lambda span: span[0])
        for span in spans[first:]:
            if span[0] >= whole[1]:
                break
            if span[0] < at or span[1] > whole[1] or span == whole:
                continue
            pieces += [self.data[at : span[0]], self._render_parts(span, spans)]
            at = span[1]
        return b"".join([*pieces, self.data[at : whole[1]]])

    def _render_parts(self, span: Span, spans: Sequence[Span]) -> bytes:
        rendered = b""
        for part in self._parts[span]:
            if isinstance(part, str):
                rendered += part.encode()
            elif part != span and part in self._parts:
                rendered += self._render_parts(part, spans)
            else:
                rendered += self._render(part, spans)
        return rendered
