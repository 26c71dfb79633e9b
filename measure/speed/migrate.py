"""How fast ``unipar migrate`` reads scripts and changes imports, beside what LibCST alone takes."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from time import process_time

import libcst as cst
from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper, ScopeProvider

from measure.report import Row, microseconds
from measure.speed.timing import BASELINE, in_turns
from unipar.migrate import migrate_files
from unipar.migrate.writing import Program, read

CORPUS = Path(__file__).resolve().parents[2] / "tests" / "migrate" / "corpus"
SECONDS_A_LINE = 1 / 2000
# Of the standard library: a few hundred lines of classes and functions each.
MODULES = ("textwrap", "contextlib", "csv", "queue", "shlex")

Programs = Sequence[Program]


def measure(*, quick: bool) -> list[Row]:
    """All programs once a turn, beside LibCST's parser and metadata of the same files."""
    turns = 2 if quick else 15
    corpus = [read([main.parent]) for main in sorted(CORPUS.glob("*/*/train.py"))]
    rows: list[Row] = []
    for what, programs in (("the corpus", corpus), ("scripts of some hundred lines", _long())):
        _migrate(programs[0])
        measured = in_turns(
            {"ours": _clocked(programs, _migrate), BASELINE: _clocked(programs, _parse)}, turns
        )
        lines = _lines(programs)
        name = f"`unipar migrate`, a line of {what} ({len(programs)} programs, {lines} lines)"
        aim = [SECONDS_A_LINE] * turns
        rows += [
            Row.timed(f"{name}, beside 2,000 lines a second", measured["ours"], aim,
                      microseconds, aim=1.0),
            Row.timed(f"{name}, beside LibCST's parser, positions and scopes", measured["ours"],
                      measured[BASELINE], microseconds),
        ]  # fmt: skip
    return rows


def _long() -> Programs:
    """Training scripts below code that has nothing to do with training."""
    library = Path(sysconfig.get_paths()["stdlib"])
    programs = ("torch/flat", "torch/trainer", "torch/gan", "ddp/functions", "ddp/flat")
    texts = [
        f"{(library / f'{module}.py').read_text()}\n{(CORPUS / name / 'train.py').read_text()}"
        for module, name in zip(MODULES, programs, strict=True)
    ]
    return [Program(CORPUS, {"train.py": text}, False, {}) for text in texts]


def _lines(programs: Programs) -> int:
    return sum(text.count("\n") for one in programs for text in one.files.values())


def _migrate(program: Program) -> None:
    migrate_files(program.files, settings=program.settings)


def _parse(program: Program) -> None:
    for text in program.files.values():
        wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
        wrapper.resolve_many((ByteSpanPositionProvider, ScopeProvider))


def _clocked(programs: Programs, handle: Callable[[Program], object]) -> Callable[[], float]:
    """A function that handles all programs and returns the processor's seconds for a line."""
    lines = _lines(programs)

    def run() -> float:
        began = process_time()
        for program in programs:
            handle(program)
        return (process_time() - began) / lines

    return run
