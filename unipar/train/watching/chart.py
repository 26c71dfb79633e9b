"""Curves in a terminal, of braille characters: two dots across and four down in each."""

from __future__ import annotations

from collections.abc import Sequence

# Unicode 16.0, block "Braille Patterns": the bit of each dot, by column and row.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
Point = tuple[float, float]


def curve(points: Sequence[Point], width: int, height: int, ends: Point, plain: bool) -> list[str]:
    """Draw a line through points, as ``height`` lines of ``width`` characters.

    Where several points share a column, all values between the least and the most are dotted.

    Args:
        points: by x.
        width: characters across.
        height: lines.
        ends: the least and the greatest x.
        plain: with asterisks, for terminals without braille.
    """
    across, down = (width, height) if plain else (2 * width, 4 * height)
    low, high = bounds(points)
    cells = [[0] * width for _ in range(height)]
    before: tuple[int, int] | None = None
    for x, y in points:
        column = _place(x, *ends, across)
        row = down - 1 - _place(y, low, high, down)
        spans = [(column, row, row)] if before is None else _line(*before, column, row)
        for at, top, bottom in spans:
            for dot in range(top, bottom + 1):
                bit = 1 if plain else _DOTS[at % 2][dot % 4]
                cells[dot if plain else dot // 4][at if plain else at // 2] |= bit
        before = column, row
    marks = " *" if plain else None
    return [
        "".join(marks[bits] if marks else chr(0x2800 + bits) if bits else " " for bits in row)
        for row in cells
    ]


def bounds(points: Sequence[Point]) -> Point:
    """The least and the greatest y."""
    values = [y for _, y in points]
    return min(values), max(values)


def _place(value: float, low: float, high: float, count: int) -> int:
    return round((value - low) / (high - low) * (count - 1)) if high > low else 0


def _line(x0: int, y0: int, x1: int, y1: int) -> list[tuple[int, int, int]]:
    """Columns from one dot to another, each with its first and last row."""
    spans = []
    for x in range(x0, x1 + 1):
        from_, to = (
            (y0 + (y1 - y0) * (at - x0) / max(1, x1 - x0)) for at in (x - 0.499, x + 0.499)
        )
        rows = sorted(min(max(y, min(y0, y1)), max(y0, y1)) for y in (from_, to))
        if x0 == x1:
            rows = sorted((y0, y1))
        spans.append((x, round(rows[0]), round(rows[1])))
    return spans
