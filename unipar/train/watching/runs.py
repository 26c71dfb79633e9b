"""The runs of a directory, and the state of each, by the files that it leaves."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from unipar.errors import ConfigError, did_you_mean
from unipar.train import events, lock
from unipar.train.watching.files import MOST, NotReadableError, line, number, read_end, rows, whole

State = Literal["running", "finished", "failed", "interrupted", "lost", "unknown"]
METRICS, CONFIG = "metrics.jsonl", "config.yaml"
_FILES = (METRICS, events.NAME, CONFIG, lock.NAME)
_TAIL = 2**16


@dataclass
class Run:
    """A run, by what its directory says; what it does not say is ``None``.

    Attributes:
        name: the directory's name.
        directory: where it is.
        state: ``lost`` where it was claimed by a run that lives no more and told no end;
            ``unknown`` where nothing says.
        why: the first line of the error, or the signal.
        strategy: by its registered name, of the last start.
        ranks: processes, of the last start.
        step: the last step that its metrics or events name.
        total_steps: the step at which it ends.
        loss: the last one logged.
        items_per_second: of that step.
        changed: when it last wrote metrics or events, in seconds since the epoch.
        idle: seconds since then.
        starts: how often it was started, resumed or started again.
        events: the rows of its ``events.jsonl``.
        problems: what could not be read, a line each.
    """

    name: str
    directory: Path
    state: State = "unknown"
    why: str | None = None
    strategy: str | None = None
    ranks: int | None = None
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    items_per_second: float | None = None
    changed: float = 0.0
    idle: float = 0.0
    starts: int | None = None
    events: list[dict[str, Any]] = field(default_factory=list, repr=False)
    problems: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        values = {name: value for name, value in vars(self).items() if name != "events"}
        return values | {"directory": str(self.directory)}


def find_runs(directory: Path) -> list[Run]:
    """The runs in a directory, or the one that it is itself, newest first.

    Raises:
        ConfigError: there is no such directory, or it may not be read.
    """
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be read: {error.strerror}. Runs are listed from ./runs, or from "
            "what --directory names: the directory that holds their output_dirs."
        ) from error
    if not set(_FILES).isdisjoint(names):
        return [read_run(directory)]
    found = []
    for name in names:
        path = directory / name
        try:
            if path.is_dir() and set(_FILES).isdisjoint(os.listdir(path)):
                continue
            if not path.is_dir():
                continue
        except OSError:
            pass  # It says why below.
        found.append(read_run(path))
    return sorted(found, key=lambda run: run.changed, reverse=True)


def find_run(directory: Path, name: str) -> Run:
    """One run, by its name in ``directory`` or by its path.

    Raises:
        ConfigError: there is none.
    """
    for path in (directory / name, Path(name)):
        if any(os.path.lexists(path / file) for file in _FILES):
            return read_run(path)
    try:
        known = [run.name for run in find_runs(directory)]
    except ConfigError:
        known = []
    raise ConfigError(
        f"there is no run '{name}' in {directory}, nor at that path.{did_you_mean(name, known)} "
        "`unipar runs` lists those that there are."
    )


def read_run(directory: Path) -> Run:
    """What a run's directory says of it."""
    run = Run(directory.resolve().name, directory)
    try:
        os.listdir(directory)
    except OSError as error:
        run.problems.append(f"the directory cannot be read: {error.strerror}")
        return run
    _take_config(run)
    _take_events(run)
    _take_metrics(run)
    now = _clock(directory)
    _take_claim(run, now)
    files = [directory / name for name in (METRICS, events.NAME)]
    run.changed = max(map(_changed, files)) or _changed(directory / CONFIG) or _changed(directory)
    run.idle = max(0.0, now - run.changed)
    return run


def read_metrics(run: Run) -> list[dict[str, Any]]:
    """The rows of a run's ``metrics.jsonl``, of a very long one the last."""
    try:
        data = read_end(run.directory / METRICS) or b""
    except NotReadableError:
        return []
    return [row for row in rows(data) if row and whole(row.get("step")) is not None]


def _read(run: Run, name: str, most: int) -> bytes | None:
    try:
        return read_end(run.directory / name, most)
    except NotReadableError as error:
        run.problems.append(str(error))
        return None


def _take_config(run: Run) -> None:
    data = _read(run, CONFIG, _TAIL)
    if data is None:
        return
    try:
        values = yaml.safe_load(data)
    except (yaml.YAMLError, ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        run.problems.append(f"{CONFIG} is not the config of a run")
        return
    asked = values.get("strategy")
    run.strategy = line(asked.get("name") if isinstance(asked, dict) else asked)
    run.total_steps = whole(values.get("steps"))


def _take_events(run: Run) -> None:
    data = _read(run, events.NAME, MOST)
    if data is None:
        return
    read = list(rows(data))
    run.events = [row for row in read if row and row.get("format") == events.FORMAT]
    others = {row.get("format") for row in read if row} - {events.FORMAT}
    bad = sum(row is None for row in read)
    if others:
        run.problems.append(
            f"{events.NAME} has lines of another format than {events.FORMAT}, which are left out"
        )
    if bad:
        run.problems.append(f"{events.NAME} has {bad} lines that are no JSON objects, left out")
    started = [row for row in run.events if row.get("event") == "started"]
    run.starts = len(started) or None
    if started:
        last = started[-1]
        run.strategy = line(last.get("strategy")) or run.strategy
        run.ranks = whole(last.get("world_size"))
        run.total_steps = whole(last.get("total_steps"))
    steps = [step for row in run.events if (step := whole(row.get("step"))) is not None]
    run.step = steps[-1] if steps else None
    if run.events:
        last = run.events[-1]
        if last.get("event") == "ended" and last.get("how") in (
            "finished",
            "failed",
            "interrupted",
        ):
            run.state = last["how"]
            run.why = line(last.get("error") or last.get("signal"))


def _take_metrics(run: Run) -> None:
    data = _read(run, METRICS, _TAIL)
    if data is None:
        return
    # The first line of what is read may be the end of one.
    read = list(rows(data))[1 if len(data) == _TAIL else 0 :]
    trained = [row for row in read if row and "loss" in row and whole(row.get("step"))]
    if data and not trained:
        run.problems.append(f"{METRICS} holds no step that can be read")
    elif bad := sum(row is None for row in read):
        run.problems.append(f"{METRICS} has {bad} lines that are no JSON objects, left out")
    if trained:
        last = trained[-1]
        run.step = max(run.step or 0, last["step"])
        run.loss = number(last["loss"])
        if run.loss is None:
            run.problems.append("the last loss that was logged is not finite")
        run.items_per_second = number(last.get("items_per_second"))


def _take_claim(run: Run, now: float) -> None:
    path = run.directory / lock.NAME
    data = _read(run, lock.NAME, _TAIL)
    if data is None:
        return
    try:
        holder = json.loads(data)
    except (ValueError, RecursionError):
        holder = None
    age = max(0.0, now - _changed(path))
    if not lock.is_gone(holder if isinstance(holder, dict) else {}, age):
        run.state, run.why = "running", None
    elif run.state == "unknown":
        run.state = "lost"


def _clock(directory: Path) -> float:
    """The file system's; this machine's where it may not be asked, for that takes a new file."""
    try:
        return lock.clock(directory)
    except OSError:
        return time.time()


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
