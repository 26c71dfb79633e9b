"""Metrics as JSON lines: the file that every run leaves behind."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

from unipar.callbacks.loggers.base import Logger
from unipar.callbacks.records import RunInfo
from unipar.errors import ConfigError
from unipar.utils.replacing import replacing


class JSONLLogger(Logger):
    """Appends one JSON object a line to ``metrics.jsonl`` in the output directory.

    Training rows hold ``step`` (from 1), ``epoch`` (from 0), ``loss``, …; evaluation rows hold
    ``step`` and names that begin with ``eval/``. A value that is NaN or infinite is ``null``. A row
    is in the file as soon as its step has ended. When a run resumes, rows of later steps than the
    one it resumes from are dropped first, so each step is there once; a run from step 0 starts the
    file again.

    Args:
        filename: the file's name within the output directory.
    """

    def __init__(self, filename: str = "metrics.jsonl") -> None:
        self.filename = filename
        self._file: TextIO | None = None
        self._encode = json.JSONEncoder(allow_nan=False).encode

    def start(self, run: RunInfo) -> None:
        path = run.output_dir / self.filename
        with _writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                _truncate(path, run.start_step)
            # Line buffered: with slow steps a row would otherwise wait minutes for company.
            self._file = path.open("a", buffering=1, encoding="utf-8")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        assert self._file is not None, "log before start"
        row = {"step": step, **metrics}
        try:
            line = self._encode(row)
        except ValueError:  # NaN and infinity are no JSON
            line = self._encode({key: _finite(value) for key, value in row.items()})
        with _writing(Path(self._file.name)):
            self._file.write(line + "\n")

    def fail(self, error: BaseException) -> None:
        # What cannot be written now has been said by the error itself.
        with contextlib.suppress(ConfigError):
            self.close()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with _writing(Path(file.name)):
                file.close()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, float | None]]:
    """The rows of a ``metrics.jsonl``, a last line cut short by a crash left out."""
    return [row for row, _ in _rows(Path(path))]


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the metrics file {path} cannot be written: {error.strerror or error}. Free some "
            "space or choose another output_dir; resume='auto' goes on from the newest checkpoint."
        ) from error


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _rows(path: Path) -> Iterator[tuple[dict[str, float | None], str]]:
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:  # the line that a killed process was writing
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                yield row, line.rstrip("\n") + "\n"


def _truncate(path: Path, last_step: int) -> None:
    """Keep the rows up to ``last_step``; a crash leaves either the old file or the new one."""
    with replacing(path) as partial, partial.open("w", encoding="utf-8") as kept:
        kept.writelines(line for row, line in _rows(path) if (row["step"] or 0) <= last_step)
        kept.flush()
        os.fsync(kept.fileno())
