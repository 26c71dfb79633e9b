"""``unipar checkpoints``."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from cyclopts import App, Parameter

from unipar.errors import CheckpointError, ConfigError
from unipar.utils.console import open_console
from unipar.utils.listing import TEMPORARY, Listed, kept, list_checkpoints, named_step, read
from unipar.utils.urls import is_url

Switch = Parameter(negative="")
CONFIG, FOLDER = "config.yaml", "checkpoints"
# Where the output is no terminal, a table has every column, and no line is cut.
_WIDTH_OF_PIPE = 1000

app = App(name="checkpoints", help="List, verify and remove the checkpoints of a run.")


class Rule(NamedTuple):
    """Which checkpoints are kept; see :class:`unipar.checkpoint.Retention`."""

    keep_last: int | None
    bests: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        best = [f"the best by {metric} ({mode})" for metric, mode in self.bests]
        last = "all" if self.keep_last is None else f"the last {self.keep_last}"
        return " and ".join([last, *best])


@app.command
def ls(
    directory: Path = Path(),
    *,
    as_json: Annotated[bool, Parameter("--json", negative="")] = False,
) -> None:
    """List the checkpoints of a run, the newest last.

    A checkpoint is whole if its manifest is valid and every file has its size; `unipar checkpoints
    verify` reads the data too. Those that the run's own retention keeps are named so.

    Args:
        directory: a run's output directory, the directory of its checkpoints, or one of these.
        as_json: print what is known of each as JSON.
    """
    found, place = _found(directory)
    rule = _rule_of_run(place)
    why = {} if rule is None else kept([one for one in found[::-1] if not one.problem], *rule)
    if as_json:
        print(json.dumps([_as_dict(one, rule, why) for one in found], indent=2))
        return
    if not found:
        print(f"There are no checkpoints in {place.absolute()}.")
        return
    open_console(width_of_pipe=_WIDTH_OF_PIPE).print(_table(found, rule, why))


@app.command
def verify(path: Path = Path(), *, quick: Annotated[bool, Switch] = False) -> int:
    """Hold every byte of a checkpoint against its checksums.

    Files are read several at a time. Ends with exit code 1 where something is damaged or missing,
    and names the file.

    Args:
        path: a checkpoint, or a directory of them, all of which are verified.
        quick: read only sizes, headers and random generators.
    """
    found, place = _found(path)
    found = [one for one in found if not one.path.name.startswith(TEMPORARY)]
    if not found:
        raise ConfigError(f"there is no checkpoint in {place}.")
    from rich.text import Text

    console = open_console(width_of_pipe=_WIDTH_OF_PIPE)
    damaged = False
    for one in found:
        name = one.path.name if len(found) > 1 else str(one.path)
        try:
            seconds = _verify(one, quick)
        except CheckpointError as error:
            damaged = True
            console.print(Text.assemble(("damaged", "bold red"), f"  {name}"), soft_wrap=True)
            console.print(str(error), soft_wrap=True)
            continue
        what = "headers and sizes are right" if quick else _rate(one, seconds)
        line = Text.assemble(("whole", "green"), f"    {name}: {_held(one)}, {what}")
        console.print(line, soft_wrap=True)
    return 1 if damaged else 0


@app.command
def rm(
    paths: Annotated[list[Path], Parameter(negative="")],
    /,
    *,
    keep_last: int | None = None,
    keep_best: Annotated[list[str] | None, Parameter(negative="")] = None,
    yes: Annotated[bool, Switch] = False,
    force: Annotated[bool, Switch] = False,
) -> None:
    """Remove checkpoints, or all but some of a run's.

    Asks first. The newest whole one stays unless `--force` is given, and so does what is not whole
    unless it is named. Every byte of the newest that stays is verified before others are removed.
    Refuses while a run holds the directory.

    Args:
        paths: checkpoints; with `--keep-last` or `--keep-best` the directory of a run or of its
            checkpoints.
        keep_last: keep that many of the newest, and remove the others.
        keep_best: keep the best by this metric too: `loss`, or `accuracy:max`.
        yes: do not ask.
        force: remove the newest whole one too, and verify nothing.
    """
    from unipar.train import lock

    rule = None
    if keep_last is not None or keep_best:
        rule = _rule(1 if keep_last is None else keep_last, keep_best or [])
    doomed = _doomed(paths, rule, force=force)
    lock.refuse_if_held(*_parents(doomed))
    if not doomed:
        print("There is nothing to remove.")
        return
    if not force:
        _verify_newest(doomed)
    if not yes:
        _ask(doomed)
    with lock.held(*_parents(doomed)):
        if [one.path for one in _doomed(paths, rule, force=force)] != [one.path for one in doomed]:
            raise ConfigError("the checkpoints have changed meanwhile. Look at them again.")
        _remove(doomed)


def _found(directory: Path) -> tuple[list[Listed], Path]:
    """The checkpoints that a path means, and the directory that they are in."""
    # A path has lost one of the slashes by now.
    if is_url(re.sub(":/", "://", str(directory), count=1)) and not directory.exists():
        raise ConfigError(
            f"{directory} is a URL, and this looks at directories. Checkpoints at URLs are thinned "
            "by the run that copies them there (keep_last, keep_best)."
        )
    if directory.is_symlink() and not directory.exists():
        raise ConfigError(
            f"{directory} is a link to {os.readlink(directory)}, and there is nothing. Link it "
            "to a checkpoint or a directory of them, or remove the link as any file."
        )
    try:
        if (step := named_step(directory.resolve().name)) is not None:
            if not directory.is_dir():
                raise ConfigError(f"there is no checkpoint {directory}.")
            return [read(directory, step)], directory.resolve().parent
        found = list_checkpoints(directory)
        if not found and (directory / FOLDER).is_dir():
            directory = directory / FOLDER
            found = list_checkpoints(directory)
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be read: {error.strerror}. Give a run's output directory, or the "
            "directory of its checkpoints."
        ) from error
    return found, directory


def _rule_of_run(place: Path) -> Rule | None:
    """What the run that writes into a directory keeps, if its config says so."""
    import yaml

    try:
        values = yaml.safe_load((place.resolve().parent / CONFIG).read_text())
        settings = values["checkpoint"]
        best = settings["keep_best"]
        return Rule(settings["keep_last"], ((best["metric"], best["mode"]),) if best else ())
    except (OSError, yaml.YAMLError, ValueError, RecursionError, TypeError, KeyError):
        return None


def _rule(keep_last: int, keep_best: Sequence[str]) -> Rule:
    if keep_last < 1:
        raise ConfigError(f"--keep-last {keep_last} would keep no checkpoint. Give 1 or more.")
    bests = []
    for text in keep_best:
        metric, _, mode = text.partition(":")
        if mode not in ("", "min", "max"):
            raise ConfigError(f"--keep-best {text}: write it like loss, or accuracy:max.")
        bests.append((metric, mode or "min"))
    return Rule(keep_last, tuple(bests))


def _doomed(paths: Sequence[Path], rule: Rule | None, *, force: bool) -> list[Listed]:
    doomed: dict[Path, Listed] = {}
    for path in paths:
        found, place = _found(path)
        whole = [one for one in list_checkpoints(place)[::-1] if not one.problem]
        if rule is not None:
            if named_step(path.resolve().name) is not None:
                raise ConfigError(
                    f"{path} is one checkpoint; --keep-last and --keep-best take the directory "
                    "that it is in."
                )
            for metric, _ in rule.bests:
                if whole and not any(metric in one.metrics for one in whole):
                    raise ConfigError(f"no checkpoint in {place} has the metric '{metric}'.")
            stay = kept(whole, *rule)
            found = [one for one in whole[::-1] if one.path not in stay]
        elif path.is_symlink():
            raise ConfigError(
                f"{path} is a link to {path.resolve()}. Name what is to be removed by its own "
                "path; the link can be removed as any file."
            )
        elif named_step(path.name) is None:
            raise ConfigError(
                f"{path} is no checkpoint (step-…). To remove all but some of a directory, say how "
                "many stay: --keep-last 2."
            )
        newest = whole[0].path.resolve() if whole else None
        for one in found:
            if one.path.resolve() == newest and not force:
                raise ConfigError(
                    f"{one.path} is the newest whole checkpoint in {place}, from which a run would "
                    "go on. Give --force to remove it all the same."
                )
            doomed[one.path.resolve()] = one
    return list(doomed.values())


def _verify_newest(doomed: Sequence[Listed]) -> None:
    """Refuse to leave a directory with a newest checkpoint that is damaged."""
    gone = {one.path.resolve() for one in doomed}
    for place in _parents(doomed):
        staying = [
            one
            for one in list_checkpoints(place)
            if not one.problem and one.path.resolve() not in gone
        ]
        if not staying:
            continue
        try:
            _verify(staying[-1], quick=False)
        except CheckpointError as error:
            raise ConfigError(
                f"{staying[-1].path} is the newest that would stay, and it is damaged: {error}\n"
                "Remove that one first, by its path and --force; nothing was removed."
            ) from error


def _parents(doomed: Sequence[Listed]) -> list[Path]:
    return sorted({one.path.resolve().parent for one in doomed})


def _ask(doomed: Sequence[Listed]) -> None:
    from rich.filesize import decimal

    if not sys.stdin.isatty():
        raise ConfigError("rm asks before it removes, and there is no terminal. Give --yes.")
    for one in doomed:
        print(f"{one.path}  {_held(one)}")
    size = decimal(sum(one.num_bytes for one in doomed))
    if input(f"Remove {_count(len(doomed), 'checkpoint')}, {size}? [y/N] ").strip().lower() != "y":
        raise ConfigError("nothing was removed.")


def _remove(doomed: Sequence[Listed]) -> None:
    from unipar.checkpoint.directory import remove

    for one in doomed:
        try:
            remove(one.path)
        except OSError as error:
            raise CheckpointError(
                f"Cannot remove {error.filename or one.path}: {error.strerror}."
            ) from error
        print(f"removed {one.path}")


def _verify(one: Listed, quick: bool) -> float:
    """Verify one, with a bar on a terminal; the seconds that it took."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    from unipar import checkpoint

    shown = open_console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    hidden = quick or not shown.is_terminal
    with Progress(*columns, console=shown, transient=True, disable=hidden) as bar:
        task = bar.add_task("", total=one.num_bytes)
        began = time.perf_counter()
        checkpoint.verify(
            one.path, quick=quick, progress=lambda num_bytes: bar.advance(task, num_bytes)
        )
        return time.perf_counter() - began


def _rate(one: Listed, seconds: float) -> str:
    from rich.filesize import decimal

    return f"{seconds:.1f} s, {decimal(int(one.num_bytes / max(seconds, 1e-9)))}/s"


def _held(one: Listed) -> str:
    from rich.filesize import decimal

    return f"{decimal(one.num_bytes)} in {_count(one.num_files, 'file')}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _as_dict(one: Listed, rule: Rule | None, why: dict[Path, str]) -> dict[str, Any]:
    return {
        **vars(one),
        "path": str(one.path),
        # JSON has no other numbers.
        "metrics": {n: v if math.isfinite(v) else None for n, v in one.metrics.items()},
        "whole": one.problem is None,
        "kept": None if rule is None else one.path in why,
        "kept_as": why.get(one.path),
    }


def _table(found: Sequence[Listed], rule: Rule | None, why: dict[Path, str]) -> Any:
    from rich.console import Group
    from rich.filesize import decimal
    from rich.text import Text

    from unipar.utils.fitted_table import OPTIONS, FittedTable

    made = FittedTable(elsewhere="`unipar checkpoints ls --json` has all")
    made.add_column("step", 0, right=True)
    made.add_column("written", 2)
    made.add_column("size", 3, right=True)
    made.add_column("strategy", 5, breaks=OPTIONS)
    made.add_column("ranks", 6, right=True)
    made.add_column("metrics", 4)
    made.add_column("state", 1)
    for one in found:
        known = bool(one.num_files)
        made.add_row(
            str(one.step),
            time.strftime("%m-%d %H:%M", time.localtime(one.written)) if known else "",
            decimal(one.num_bytes) if known else "",
            Text(one.strategy),
            str(one.ranks) if known else "",
            Text("\n".join(_metrics(one))),
            Text("not whole", "red") if one.problem else Text(_state(one, why), "green"),
        )
    notes = [Text(f"{one.path.name}: {one.problem}") for one in found if one.problem]
    if rule is not None:
        notes.append(Text(f"The run keeps {rule}."))
    return Group(made, *notes)


def _state(one: Listed, why: dict[Path, str]) -> str:
    return f"kept: {why[one.path]}" if one.path in why else "whole"


def _metrics(one: Listed) -> Iterator[str]:
    return (f"{name} {value:.4g}" for name, value in one.metrics.items())
