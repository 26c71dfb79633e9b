"""The figures of the pages, as SVG."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
ORDER = ROOT / "tests" / "unit" / "test_import_order.py"
SANS = "Helvetica, Arial, DejaVu Sans, sans-serif"
MONO = "Menlo, Consolas, DejaVu Sans Mono, monospace"
INK, FAINT, PAPER = "#1f2933", "#697586", "#ffffff"
FILLS = ("#eceff1", "#e8eef7", "#e2f1f3", "#fdf0d5", "#e6f4ea", "#e0e7ff", "#f3e8f3", "#eceff1")
WIDTH = 840


def floors() -> dict[str, tuple[str, ...]]:
    """The entries of ``unipar/`` by floor, lowest first, as the test of imports has them."""
    for node in ast.parse(ORDER.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLOORS":
            return ast.literal_eval(node.value)
    raise LookupError(f"{ORDER} has no FLOORS")


def purposes() -> Iterator[tuple[str, str, str]]:
    """Floor, entry and the first line of its docstring, highest first."""
    for floor, entries in reversed(floors().items()):
        for entry in reversed([entry for entry in entries if not entry.startswith("__")]):
            path = ROOT / "unipar" / entry
            path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            name = f"{entry}/" if path.name == "__init__.py" else path.name
            yield floor, name, text.splitlines()[0]


def floors_figure() -> str:
    """The floors of ``unipar/`` as bands, and the backends beside the one that they implement."""
    parts, top = [], 12
    for number, (floor, entries) in reversed([*enumerate(floors().items())]):
        fill = FILLS[number % len(FILLS)]
        names = [entry for entry in entries if not entry.startswith("__")] + (
            ["import unipar"] if "__init__" in entries else []
        )
        rows = _rows(names, 470)
        height = 14 + 34 * len(rows)
        parts.append(_box(12, top, 640, height, fill))
        parts += _lines(24, top + height / 2, floor, 14)
        for row_number, row in enumerate(rows):
            left = 150
            for name in row:
                wide = _wide(name)
                parts.append(_box(left, top + 10 + 34 * row_number, wide, 28, PAPER))
                parts.append(_text(left + wide / 2, top + 29 + 34 * row_number, name, mono=True))
                left += wide + 8
        if "strategy" in entries:
            middle = top + height / 2
            parts.append(_box(692, top - 20, 136, height + 40, fill, dashed=True))
            parts += _lines(760, middle - 8, "backends/NAME", 20, anchor="middle", mono=True)
            parts.append(_text(760, middle + 10, "one distribution", small=True))
            parts.append(_text(760, middle + 26, "for a framework", small=True))
            parts.append(_arrow(692, middle, 656, middle))
        top += height + 8
    parts.append(
        _text(332, top + 14, "each imports only what stands below it, or left of it", small=True)
    )
    return _svg(top + 26, "The packages of unipar by floor", parts)


def seam_figure() -> str:
    """The core on one side, a framework on the other, and the calls that cross."""
    parts = [
        _box(12, 12, 250, 296, FILLS[1]),
        _box(578, 12, 250, 296, FILLS[3]),
        _text(137, 40, "the core", bold=True),
        _text(703, 40, "a backend", bold=True),
        f'<line x1="420" y1="16" x2="420" y2="304" stroke="{FAINT}" stroke-dasharray="5 4"/>',
    ]
    core = (
        ("fit · Session · spawn", "start: processes, settings"),
        ("data/", "order by (seed, epoch) alone"),
        ("train/", "steps, evaluation, signals"),
        ("checkpoint/", "logical tensors by name"),
    )
    backend = (
        ("reducer", "each gradient summed once"),
        ("precision policy", "autocast, loss scaling"),
        ("stepper", "clip, update, skip"),
        ("model state", "which parts are here"),
    )
    for left, entries in ((28, core), (594, backend)):
        for number, (name, purpose) in enumerate(entries):
            top = 56 + 62 * number
            parts.append(_box(left, top, 218, 52, PAPER))
            parts.append(_text(left + 109, top + 22, name, bold=True))
            parts.append(_text(left + 109, top + 40, purpose, small=True))
    calls = (
        ("prepare(spec, world)", True),
        ("train_step(batch, loss)", True),
        ("loss, gradient norm", False),
        ("eval_batch(batch, loss)", True),
        ("export_state()", False),
        ("import_state(source)", True),
    )
    for number, (call, forth) in enumerate(calls):
        middle = 66 + 44 * number
        ends = (266, 574) if forth else (574, 266)
        parts.append(_arrow(ends[0], middle, ends[1], middle))
        parts.append(_text(420, middle - 7, call, mono=True, halo=True))
    return _svg(320, "The seam between unipar's core and a framework: a whole training step", parts)


def experts_figure() -> str:
    """Tokens of two ranks on their way to the experts of both, and back."""
    parts = []
    for rank in range(2):
        left = 12 + 420 * rank
        parts.append(_box(left, 12, 396, 308, FILLS[1 if rank else 3]))
        parts.append(_text(left + 198, 36, f"rank {rank}", bold=True))
        for top, name, purpose in (
            (48, "router", "two experts and their weights for each token of its samples"),
            (256, "weighted sum", "of what has come back, in the order of its tokens"),
        ):
            parts.append(_box(left + 18, top, 360, 50, PAPER))
            parts.append(_text(left + 198, top + 21, name, bold=True))
            parts.append(_text(left + 198, top + 39, purpose, small=True))
        for number in range(2):
            parts.append(_box(left + 38 + 170 * number, 152, 150, 50, FILLS[4]))
            parts.append(_text(left + 113 + 170 * number, 182, f"expert {2 * rank + number}"))
    for start, end in ((98, 152), (202, 256)):
        parts += [_arrow(x, start, x, end) for x in (113, 727)]
        parts += [_arrow(x, start, y, end) for x, y in ((298, 516), (542, 324))]
    for middle, text in ((129, "tokens"), (233, "outcomes")):
        parts.append(_text(420, middle, f"{text}: all to all", halo=True, mono=True))
    return _svg(332, "Tokens travel to the ranks of their experts, and back", parts)


def sequences_figure() -> str:
    """A sequence in chunks, the two of each rank, and the ring that keys and values go round."""
    parts = [_text(420, 34, "one sequence, in 2 · cp chunks (cp = 4)", bold=True)]
    owners = [0, 1, 2, 3, 3, 2, 1, 0]
    fills = (FILLS[1], FILLS[2], FILLS[3], FILLS[4])
    for chunk, rank in enumerate(owners):
        left = 60 + 90 * chunk
        parts.append(_box(left, 48, 90, 40, fills[rank]))
        parts.append(_text(left + 45, 73, f"chunk {chunk}"))
    for rank in range(4):
        left = 40 + 200 * rank
        parts.append(_box(left, 150, 160, 118, fills[rank]))
        parts.append(_text(left + 80, 174, f"rank {rank}", bold=True))
        held = [chunk for chunk, owner in enumerate(owners) if owner == rank]
        parts.append(_text(left + 80, 198, f"chunks {held[0]} and {held[1]}"))
        parts.append(_text(left + 80, 220, "embeddings, norms, MLPs,", small=True))
        parts.append(_text(left + 80, 236, "logits, loss: its own", small=True))
        parts.append(_text(left + 80, 256, "q, k, v", mono=True))
        if rank < 3:
            parts.append(_arrow(left + 162, 252, left + 198, 252))
    parts += [
        f'<path d="M720 272 V304 H120 V276" fill="none" stroke="{FAINT}" stroke-width="1.5" '
        'marker-end="url(#tip)"/>',
        _text(420, 300, "k and v go round, while q stays", mono=True, halo=True),
        _text(420, 122, "each rank has an early chunk and a late one: equal work", small=True),
    ]
    return _svg(322, "A sequence divided among four ranks, and the ring of its attention", parts)


def layers_figure() -> str:
    """A pair of layers on two ranks: columns, rows, and the sum behind them."""
    parts = [_box(12, 30, 130, 230, FILLS[0]), _text(77, 140, "activations", bold=True)]
    parts += [_text(77, 160, "the same", small=True), _text(77, 176, "on both ranks", small=True)]
    for rank in range(2):
        top, fill = 30 + 120 * rank, FILLS[1 if rank else 3]
        parts.append(_box(190, top, 430, 110, fill))
        parts.append(_text(202, top + 20, f"rank {rank}", bold=True, anchor="start"))
        for left, name, purpose in (
            (202, "up", "half of the columns"),
            (352, "activation", "half of the units"),
            (492, "down", "half of the rows"),
        ):
            parts.append(_box(left, top + 34, 118, 56, PAPER))
            parts.append(_text(left + 59, top + 58, name, bold=True))
            parts.append(_text(left + 59, top + 78, purpose, small=True))
        middle = top + 62
        parts += [_arrow(x, middle, y, middle) for x, y in ((142, 202), (320, 352), (470, 492))]
        parts.append(_arrow(610, middle, 690, middle))
    parts.append(_box(690, 30, 138, 230, FILLS[4]))
    parts.append(_text(759, 130, "sum", bold=True))
    parts += [_text(759, 152, "all-reduce", mono=True), _text(759, 172, "whole again", small=True)]
    title = "Two layers divided between two ranks: columns of one, rows of the next, and a sum"
    return _svg(276, title, parts)


def stages_figure() -> str:
    """Four micro-batches on two stages under 1f1b, and when ranks wait."""
    parts = [_text(420, 30, "1f1b: two stages, four micro-batches", bold=True)]
    unit, first = 46, 126
    for rank, steps in enumerate(("F0 F1 . . B0 F2 B1 F3 B2 . B3", ". F0 B0 F1 B1 F2 B2 F3 B3")):
        top, left = 52 + 72 * rank, first
        parts.append(_text(14, top + 22, f"rank {rank}", bold=True, anchor="start"))
        parts.append(_text(14, top + 40, f"stage {rank}", small=True, anchor="start"))
        parts.append(_box(first, top, 15 * unit, 52, FILLS[0], dashed=True))
        for step in steps.split():
            # A backward pass takes twice as long as a forward pass.
            long = unit * (2 if step[0] == "B" else 1)
            if step != ".":
                parts.append(_box(left, top, long, 52, FILLS[1 if step[0] == "F" else 3]))
                parts.append(_text(left + long / 2, top + 31, step))
            left += long
    for left, fill, dashed, text in (
        (126, FILLS[1], False, "forward"),
        (266, FILLS[3], False, "backward"),
        (416, FILLS[0], True, "waits: (p - 1) / (m + p - 1) = 1/5 of the step"),
    ):
        parts.append(_box(left, 202, 22, 18, fill, dashed))
        parts.append(_text(left + 30, 216, text, anchor="start"))
    return _svg(238, "When two stages compute and when they wait, under 1f1b", parts)


def axes_figure() -> str:
    """Eight ranks of two nodes: which ranks are on one axis."""
    parts = [_text(420, 30, "mesh:pp=2,tp=2 on eight: dp_shard=2 is what is left", mono=True)]
    fills = (FILLS[3], FILLS[1])
    for stage in range(2):
        left = 12 + 420 * stage
        parts.append(_box(left, 46, 396, 244, FILLS[0]))
        parts.append(_text(left + 198, 70, f"node {stage}: stage {stage}", bold=True))
        for shard in range(2):
            top = 86 + 100 * shard
            for part in range(2):
                x, rank = left + 24 + 190 * part, 4 * stage + 2 * shard + part
                parts.append(_box(x, top, 158, 74, fills[part]))
                parts.append(_text(x + 79, top + 22, f"rank {rank}", bold=True))
                parts.append(_text(x + 79, top + 42, f"half {part} of each layer", small=True))
                parts.append(_text(x + 79, top + 60, f"samples {shard}, shard {shard}", small=True))
            parts.append(_arrow(left + 182, top + 37, left + 214, top + 37))
            parts.append(_arrow(left + 214, top + 37, left + 182, top + 37))
    parts += [_arrow(408, y, 432, y) for y in (123, 223)]
    for x in (103, 293, 523, 713):
        parts += [_arrow(x, 160, x, 186), _arrow(x, 186, x, 160)]
    for left, text in (
        (20, "↔ tp: sums of activations, in each layer"),
        (290, "↕ dp_shard: parameters, gradients"),
        (520, "→ pp: activations, to the rank in the same place"),
    ):
        parts.append(_text(left, 314, text, anchor="start", small=True))
    return _svg(330, "Eight ranks by stage, share of the samples and part of each layer", parts)


def _rows(names: list[str], width: float) -> list[list[str]]:
    rows, used = [[]], 0.0
    for name in names:
        if used + _wide(name) > width:
            rows.append([])
            used = 0.0
        rows[-1].append(name)
        used += _wide(name) + 8
    return rows


def _wide(name: str) -> float:
    return 8.2 * len(name) + 20


def _svg(height: float, title: str, parts: list[str]) -> str:
    marker = (
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{FAINT}"/></marker>'
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img" '
        f'font-family="{SANS}" font-size="14" fill="{INK}">\n'
        f"<title>{escape(title)}</title>\n<defs>{marker}</defs>\n"
        f'<rect width="{WIDTH}" height="{height:g}" rx="8" fill="{PAPER}"/>'
    )
    return "\n".join([head, *parts, "</svg>\n"])


def _box(left: float, top: float, wide: float, high: float, fill: str, dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<rect x="{left:g}" y="{top:g}" width="{wide:g}" height="{high:g}" rx="6" fill="{fill}" '
        f'stroke="#c3cad4"{dashes}/>'
    )


def _text(
    middle: float,
    base: float,
    text: str,
    *,
    anchor: str = "middle",
    bold: bool = False,
    small: bool = False,
    mono: bool = False,
    halo: bool = False,
) -> str:
    style = ' font-weight="bold"' if bold else ""
    style += f' font-size="12" fill="{FAINT}"' if small else ""
    style += f' font-family="{MONO}" font-size="13"' if mono else ""
    style += f' stroke="{PAPER}" stroke-width="4" paint-order="stroke"' if halo else ""
    return f'<text x="{middle:g}" y="{base:g}" text-anchor="{anchor}"{style}>{escape(text)}</text>'


def _lines(
    left: float, middle: float, text: str, longest: int, anchor: str = "start", mono: bool = False
) -> list[str]:
    lines = textwrap.wrap(text, longest)
    first = middle - 8 * (len(lines) - 1) + 5
    return [
        _text(left, first + 16 * number, line, anchor=anchor, bold=not mono, mono=mono)
        for number, line in enumerate(lines)
    ]


def _arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{FAINT}" '
        'stroke-width="1.5" marker-end="url(#tip)"/>'
    )


FIGURES = {
    ROOT / "docs" / "images" / "axes.svg": axes_figure,
    ROOT / "docs" / "images" / "experts.svg": experts_figure,
    ROOT / "docs" / "images" / "floors.svg": floors_figure,
    ROOT / "docs" / "images" / "layers.svg": layers_figure,
    ROOT / "docs" / "images" / "seam.svg": seam_figure,
    ROOT / "docs" / "images" / "sequences.svg": sequences_figure,
    ROOT / "docs" / "images" / "stages.svg": stages_figure,
}
