"""The common parts of the charts: colors, marks, dashes, and the frame that they are drawn in."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plotly import graph_objects as go

from unipar.benchmark.cells import Cell
from unipar.benchmark.report import text
from unipar.benchmark.result import BenchResult

# Told apart with any color blindness; and every color also has a mark, a dash and a pattern.
PALETTE = ("#0072b2", "#c2500a", "#00805a", "#a04a8c", "#8a6d00", "#2f7f9e", "#6b7280", "#b0304f")
DARK_PALETTE = (
    "#5ab4ec",
    "#ff9a57",
    "#3cc99b",
    "#e39bd0",
    "#e3c557",
    "#8fd3e8",
    "#b4bac5",
    "#ff8fa3",
)
"""The same on a dark page: the page exchanges them one by one."""

GREY = PALETTE[6]
_MARKS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "triangle-down", "star")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_PATTERNS = ("", "/", "x", ".", "-", "\\", "|", "+")
_ROW = 22
_CUT_ROW = 30
_FRAME = 100


@dataclass(frozen=True)
class Chart:
    """A figure, and what it shows in a sentence for who does not see it."""

    figure: go.Figure
    alt: str


@dataclass(frozen=True)
class Missing:
    """Why there is no figure."""

    reason: str


@dataclass(frozen=True)
class Look:
    """How one of several things is drawn."""

    color: str
    mark: str
    dash: str
    pattern: str

    @classmethod
    def of(cls, place: int, dash: int | None = None) -> Look:
        """Of the thing in that place; its dash may stand for something else."""
        return cls(
            color=PALETTE[place % len(PALETTE)],
            mark=_MARKS[place % len(_MARKS)],
            dash=_DASHES[(place if dash is None else dash) % len(_DASHES)],
            pattern=_PATTERNS[place % len(_PATTERNS)],
        )


def looks(result: BenchResult) -> dict[str, Look]:
    """One for each label, the same in all charts."""
    labels = dict.fromkeys(cell.cell.label for cell in result.cells)
    return {label: Look.of(place) for place, label in enumerate(labels)}


def name(cell: Cell) -> str:
    """``ddp on 4``."""
    return f"{cell.label} on {cell.devices}"


def ticks(names: Sequence[str]) -> list[str]:
    """Names beside an axis, cut where an option begins: a telephone has little room."""
    return [re.sub(r"([:,])", r"\1<br>", plain(one)) for one in names]


def fill(look: Look) -> dict[str, Any]:
    """A bar's color, with its pattern over it."""
    pattern = {"shape": look.pattern, "fillmode": "overlay", "size": 7, "solidity": 0.25}
    return {"color": look.color, "pattern": pattern}


def plain(written: str) -> str:
    """Text in which the browser finds no markup."""
    return html.escape(written, quote=False)


def frame(*, x: str, y: str, height: int = 380) -> go.Figure:
    """An empty figure with named axes; the page adds its own colors, and a legend that wraps."""
    figure = go.Figure()
    figure.update_layout(
        template="none",
        height=height,
        showlegend=False,
        # Dragging would keep a finger from scrolling the page.
        dragmode=False,
        margin={"l": 8, "r": 12, "t": 12, "b": 8},
        xaxis={"title": {"text": x, "standoff": 10}, "automargin": True},
        yaxis={"title": {"text": y, "standoff": 10}, "automargin": True},
    )
    return figure


def rows(names: Sequence[str], *, x: str, each: float = 1.0) -> go.Figure:
    """A figure with one line for each name, the first on top; ``each`` is a line's height."""
    # The page joins names that are cut where there is room; lines of two words need theirs.
    row = max(_ROW * each, _CUT_ROW if any("<br>" in tick for tick in ticks(names)) else 0)
    figure = frame(x=x, y="", height=_FRAME + round(row * len(names)))
    places = list(range(len(names)))
    figure.update_yaxes(
        tickmode="array",
        tickvals=places,
        ticktext=ticks(names),
        range=[len(names) - 0.5, -0.5],
        showgrid=False,
        zeroline=False,
    )
    figure.update_xaxes(rangemode="tozero")
    return figure


def device_axis(figure: go.Figure, counts: Sequence[int]) -> None:
    """A tick at each number of devices."""
    figure.update_xaxes(tickmode="array", tickvals=sorted(set(counts)))


def on(devices: int) -> str:
    """``on 4 devices``."""
    return f"on {text.devices(devices)}"


def shapes(count: int) -> str:
    """``1 shape``, ``16 shapes``."""
    return f"{count} shape" if count == 1 else f"{count} shapes"
