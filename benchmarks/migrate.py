"""How fast ``unipar migrate`` reads and rewrites scripts, beside what LibCST alone takes."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import process_time

import libcst as cst
from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper, ScopeProvider

from benchmarks.report import Row, microseconds
from benchmarks.timing import BASELINE, in_turns
from unipar.migrate import migrate_files

CORPUS = Path(__file__).resolve().parent.parent / "tests" / "migrate" / "corpus"
SECONDS_A_LINE = 1 / 2000
# Of the standard library: a few hundred lines of classes and functions each.
MODULES = ("textwrap", "contextlib", "csv", "queue", "shlex")

Programs = Sequence[Mapping[str, str]]


def measure(*, quick: bool) -> list[Row]:
    """All programs once a turn, beside LibCST's parser and metadata of the same files."""
    turns = 2 if quick else 15
    corpus = [
        {path.relative_to(main.parent).as_posix(): path.read_text()
         for path in main.parent.rglob("*.py")}
        for main in sorted(CORPUS.glob("*/*/train.py"))
    ]  # fmt: skip
    rows: list[Row] = []
    for what, programs in (("the corpus", corpus), ("scripts of some hundred lines", _long())):
        migrate_files(programs[0])
        measured = in_turns(
            {"ours": _clocked(programs, migrate_files), BASELINE: _clocked(programs, _read)}, turns
        )
        lines = sum(text.count("\n") for files in programs for text in files.values())
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
    return [
        {"train.py": f"{(library / f'{module}.py').read_text()}\n"
                     f"{(CORPUS / program / 'train.py').read_text()}"}
        for module, program in zip(MODULES, programs, strict=True)
    ]  # fmt: skip


def _read(files: Mapping[str, str]) -> None:
    for text in files.values():
        wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
        wrapper.resolve_many((ByteSpanPositionProvider, ScopeProvider))


def _clocked(
    programs: Programs, handle: Callable[[Mapping[str, str]], object]
) -> Callable[[], float]:
    """A function that handles all programs and returns the processor's seconds for a line."""
    lines = sum(text.count("\n") for files in programs for text in files.values())

    def run() -> float:
        began = process_time()
        for files in programs:
            handle(files)
        return (process_time() - began) / lines

    return run
