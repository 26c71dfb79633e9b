"""Records of workers' failures, and the choice of the cause among several."""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import pickle
import re
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from unipar.errors import Terminated, UniparError, WorkerError
from unipar.launch.blame import Kind, chain, classify
from unipar.launch.rundir import Attempt
from unipar.utils.progress_marks import Mark, own_mark
from unipar.utils.replacing import replacing

_MAX_MESSAGE = 2000
_MAX_FRAMES = 12
_MAX_CHAIN = 3
_note: Path | None = None


def write_failure(error: BaseException, attempt: Attempt, rank: int) -> Kind:
    """Leave word of ``error`` for the launching process.

    Raises:
        OSError: the record cannot be written.
    """
    if isinstance(error, UniparError):
        _replace(attempt.error(rank), _pack(error))
    return _write(error, attempt.record(rank))


def open_notes(path: Path) -> None:
    """Make :func:`note` write to ``path`` from now on."""
    global _note
    _note = path


def note(error: BaseException) -> None:
    """Leave word of ``error`` before this rank's connections close, and others fail by that.

    What the rank does on its way out (a save under way, a metrics writer) may take its time. Does
    nothing in a process that :func:`unipar.launch.run` did not start.
    """
    if _note is not None:
        # A disk that is full must not hide the error itself.
        with contextlib.suppress(OSError):
            _write(error, _note)


def _write(error: BaseException, path: Path) -> Kind:
    kind = classify(error)
    links = [
        {"title": _title(link), "frames": _frames(traceback.extract_tb(link.__traceback__))}
        for link in chain(error)[-_MAX_CHAIN:]
    ]
    record: dict[str, Any] = {"kind": kind.value, "links": links}
    if isinstance(error, Terminated):
        record["signal"] = error.signal.value
    if (at := own_mark()) is not None:
        record["mark"] = asdict(at)
    _replace(path, json.dumps(record).encode())
    return kind


@dataclass(frozen=True)
class Failure:
    """One rank's end, as the launching process sees it.

    Attributes:
        rank: the rank.
        kind: what the failure says about the rank.
        time: when it happened, in seconds since the epoch, by the clock of the file system where
            the rank wrote it down: those of two hosts need not agree.
        title: what happened, in a line: ``ValueError: …`` or ``killed by SIGKILL``.
        traceback: as text, shortened to the user's frames; empty when there is none.
        error: the exception itself, where it is one of the library's own.
        signal: what ended the rank, where ranks have agreed on that; else 0.
        mark: where it was.
    """

    rank: int
    kind: Kind
    time: float
    title: str
    traceback: str = ""
    error: UniparError | None = None
    signal: int = 0
    mark: Mark | None = None


def read_failure(attempt: Attempt, rank: int) -> Failure | None:
    """The failure that ``rank`` has written down, or ``None``."""
    return _read(attempt, rank, attempt.record(rank))


def read_note(attempt: Attempt, rank: int) -> Failure | None:
    """Read what ``rank`` has noted on its way out, or ``None``."""
    return _read(attempt, rank, attempt.note(rank))


def _read(attempt: Attempt, rank: int, place: Path) -> Failure | None:
    try:
        record, written = json.loads(place.read_bytes()), place.stat().st_mtime
    except FileNotFoundError:
        return None
    links = record["links"]
    path = attempt.error(rank)
    error = _unpack(path.read_bytes()) if path.exists() else None
    if error is not None and len(links) > 1:
        before = _format(links[:-1])
        error.__cause__ = WorkerError(f"on rank {rank}:\n{before}", rank=rank)
    return Failure(
        rank=rank,
        kind=Kind(record["kind"]),
        time=written,
        title=links[-1]["title"],
        traceback=_format(links),
        error=error,
        signal=record.get("signal", 0),
        mark=Mark(**record["mark"]) if "mark" in record else None,
    )


def cause(failures: list[Failure]) -> Failure:
    """The failure that brought about the others: the first that no other rank explains."""
    order = list(Kind)
    return min(failures, key=lambda failure: (order.index(failure.kind), failure.time))


def shorten_stack(text: str) -> str:
    """A ``faulthandler`` dump, turned to read from the outermost call and cut to user frames."""
    calls = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', text, re.MULTILINE)
    frames = [traceback.FrameSummary(file, int(line), name) for file, line, name in reversed(calls)]
    return _format([{"title": "", "frames": _frames(frames)}]) if frames else ""


def _title(error: BaseException) -> str:
    title = "".join(traceback.format_exception_only(type(error), error)).strip()
    return title if len(title) <= _MAX_MESSAGE else title[:_MAX_MESSAGE] + " … (cut)"


def _frames(stack: Any) -> list[Any]:
    """The user's frames of ``stack``; a number stands for that many frames of libraries."""
    frames = list(stack)
    shown = [frame for frame in frames if not _internal(frame.filename)] or frames[-3:]
    shown = shown[-_MAX_FRAMES:]
    kept: list[Any] = []
    for frame in frames:
        if any(frame is one for one in shown):
            kept.append([frame.filename, frame.lineno, frame.name, frame.line])
        elif kept and isinstance(kept[-1], int):
            kept[-1] += 1
        elif kept:
            kept.append(1)
    return kept


def _internal(filename: str) -> bool:
    names = ["torch", *(name for name in list(sys.modules) if re.fullmatch(r"unipar(_\w+)?", name))]
    files = [getattr(sys.modules.get(name), "__file__", None) for name in names]
    roots = tuple(os.path.dirname(file) + os.sep for file in files if file)
    return filename.startswith(("<frozen", *roots))


def _format(links: list[Any]) -> str:
    lines: list[str] = []
    for link in links:
        for frame in link["frames"]:
            if isinstance(frame, int):
                lines.append(f"  … {frame} more inside libraries")
                continue
            filename, lineno, name, text = frame
            # A signal may come upon an instruction that is of no line.
            at = "" if lineno is None else f", line {lineno}"
            lines.append(f'  File "{filename}"{at}, in {name}')
            # A notebook's cells are known to the process that runs the notebook alone.
            text = text or linecache.getline(filename, lineno or 0).strip()
            if text:
                lines.append(f"    {text}")
        if link["title"]:
            lines.append(link["title"])
    return "\n".join(lines)


def _pack(error: UniparError) -> bytes:
    """The parts of ``error``: calling its class with them again may need other arguments."""
    state = {}
    for name, value in vars(error).items():
        try:
            cloudpickle.dumps(value)
        except (pickle.PicklingError, TypeError, AttributeError):
            continue
        state[name] = value
    return cloudpickle.dumps((type(error), tuple(map(str, error.args)), state))


def _unpack(data: bytes) -> UniparError:
    cls, args, state = pickle.loads(data)
    error = cls.__new__(cls)
    error.args = args
    vars(error).update(state)
    return error


def _replace(path: Path, data: bytes) -> None:
    """Write a file that is either whole or absent."""
    with replacing(path) as partial:
        partial.write_bytes(data)
