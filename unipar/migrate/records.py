"""A run of an original, written where its framework is, to be compared with elsewhere."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from unipar.errors import ConfigError
from unipar.migrate.launchers import command
from unipar.migrate.verify import TOLERANCE, Proof, Run, checked, run_of, with_config
from unipar.utils.version import __version__

WHAT = "losses of a training script, by unipar migrate --record"
BOUNDS = {"float64": 1e-4, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Relative difference up to which losses of two devices agree, by the coarsest format in them.

Libraries of two devices sum in other orders and approximate functions otherwise, in each step, and
a step starts from what the one before it has made: of fp32 ten times what the order alone makes,
of half precision some units of its last place (2**-10 and 2**-7).
"""

Losses = dict[int, list[float]]


class Record(BaseModel):
    """A run of an original.

    Attributes:
        what: says that this is one.
        format: of the file.
        script: the script's path from the directory that it ran in.
        files: the SHA-256 of its code, and of settings beside it, by their paths from there.
        arguments: its command line.
        steps: backward passes that were asked for.
        seed: of the generators.
        device: what it was computed on.
        formats: the floating-point formats from parameters to loss.
        drawn: whether random numbers were drawn on an accelerator.
        versions: of Python, unipar, torch, and the frameworks that it has imported.
        losses: by rank, in the order in which ``backward()`` was called.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    what: Literal["losses of a training script, by unipar migrate --record"] = WHAT
    format: Literal[1] = 1
    script: str
    files: dict[str, str]
    arguments: list[str]
    steps: int = Field(gt=0)
    seed: int
    device: str
    formats: list[str] = Field(min_length=1)
    drawn: bool
    versions: dict[str, str]
    losses: Losses = Field(min_length=1)

    @property
    def ranks(self) -> int:
        """How many processes computed losses."""
        return len(self.losses)


def digests(files: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """The SHA-256 of a program's files, without what migration writes and what records are."""
    kept = {
        name: text for name, text in settings.items()
        if Path(name).name != "unipar.yaml" and WHAT not in text[:200]
    }  # fmt: skip
    return {name: _digest(text.encode()) for name, text in {**files, **kept}.items()}


def record(
    root: Path, script: str, files: Mapping[str, str], *, launcher: str,
    arguments: Sequence[str], steps: int, processes: int, seed: int = 0, timeout: float = 600.0,
    launched: Mapping[str, str] | None = None,
) -> Record:  # fmt: skip
    """Run a script as it is under its own launcher, in a copy of its directory.

    Args:
        root: the directory that the script runs in.
        script: its path from there.
        files: of :func:`digests`.
        launcher: what starts it: a name among :data:`unipar.migrate.launchers.LAUNCHERS`.
        arguments: its command line.
        steps: backward passes to record.
        processes: how many, where the launcher starts several.
        seed: of the generators.
        timeout: seconds.
        launched: variables that its own launcher sets.

    Raises:
        ConfigError: it fails, computes no loss other than zero, or takes no step.
    """
    run = run_of(
        root, script, {}, command(launcher, processes), name="original", arguments=arguments,
        steps=steps, seed=seed, timeout=timeout, environ=launched,
    )  # fmt: skip
    checked(Proof(run.losses, run.losses))
    return Record(
        script=script, files=dict(files), arguments=[*arguments], steps=steps, seed=seed,
        device=run.device, formats=[*run.formats], drawn=run.drawn,
        versions={**run.versions, "unipar": __version__}, losses=run.losses,
    )  # fmt: skip


def write(found: Record, path: Path) -> None:
    """Write a record, whole or not at all."""
    data = found.model_dump(mode="json")
    # Written as they are: pydantic would make null of what is no finite number.
    data["losses"] = {str(rank): losses for rank, losses in found.losses.items()}
    text = json.dumps({**data, "digest": digest_of(data)}, indent=1)
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        staged.write_text(f"{text}\n")
        staged.replace(path)
    except OSError as error:
        raise ConfigError(f"the record {path} cannot be written: {error}.") from error
    finally:
        staged.unlink(missing_ok=True)


def read(path: Path) -> Record:
    """Read a record.

    Raises:
        ConfigError: there is none, it is damaged, or it is something else.
    """
    again = "Record again: unipar migrate ... --record FILE."
    try:
        data = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"the record {path} cannot be read: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no record, or is damaged: {error}. {again}") from error
    if not isinstance(data, dict) or data.get("what") != WHAT:
        raise ConfigError(f"{path} is no record of unipar migrate --record.")
    if data.get("format") != 1:
        raise ConfigError(
            f"{path} is a record of format {data.get('format')}, and this unipar ({__version__}) "
            f"reads format 1. Use the same version on both machines, or record again."
        )
    if data.pop("digest", None) != digest_of(data):
        raise ConfigError(f"{path} is damaged, or was edited: it is not as it was written. {again}")
    try:
        return Record.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path} is no record: {where}: {first['msg']}. {again}") from error


def check(
    found: Record, root: Path, script: str, *, arguments: Sequence[str] | None,
    steps: int | None, processes: int | None,
) -> None:  # fmt: skip
    """Refuse a record of another run than the one that is asked for.

    Args:
        found: the record.
        root: the directory of the script that is here.
        script: its path from there.
        arguments: its command line, if it was given; else it is that of the record.
        steps: likewise.
        processes: likewise.

    Raises:
        ConfigError: it is of another script, or was run otherwise.
    """
    if script != found.script:
        raise ConfigError(f"the record is of {found.script}, and {script} is to be compared.")
    for name, digest in found.files.items():
        path = root / name
        if not path.is_file():
            raise ConfigError(
                f"the record is of a program that has {name}, which is not in {root}. Copy it "
                "there, or record what is there."
            )
        if _digest(path.read_bytes()) != digest:
            raise ConfigError(
                f"{path} is not the {name} that was recorded. Compare the same version, or record "
                "this one."
            )
    for what, given, recorded in (
        ("--args", None if arguments is None else [*arguments], found.arguments),
        ("--steps", steps, found.steps), ("--processes", processes, found.ranks),
    ):  # fmt: skip
        if given is not None and given != recorded:
            raise ConfigError(
                f"the record was made with {what} {_shown(recorded)}, and {_shown(given)} was "
                f"given. Leave {what} out to take the record's, or record again."
            )


def prove(
    found: Record, root: Path, migrated: Mapping[str, str], config: str, *, launcher: str,
    timeout: float = 600.0,
) -> Proof:  # fmt: skip
    """Run a migrated script as its original was recorded, and compare.

    Args:
        found: the record.
        root: the directory of the script.
        migrated: the rewritten files, by their paths from there.
        config: the text of ``unipar.yaml``.
        launcher: what starts the script.
        timeout: seconds.

    Raises:
        ConfigError: it fails, runs on another number of ranks, or on another device where nothing
            says how near its losses would be.
    """
    run = run_of(
        root, found.script, with_config(found.script, migrated, config),
        command(launcher, found.ranks), arguments=found.arguments, steps=found.steps,
        seed=found.seed, timeout=timeout,
    )  # fmt: skip
    if sorted(run.losses) != sorted(found.losses):
        raise ConfigError(
            f"the record has losses of {ranks(found.losses)}, and here the migrated script "
            f"computed them on {ranks(run.losses)}, so they are of other batches. Record on as "
            "many as can run here, or run here on as many, by --processes or by what the script "
            "itself is given (--args)."
        )
    bound = _bound(found, run)
    about = _about(found, run, bound)
    return Proof(found.losses, run.losses, bound, about, run.steps, run.moved)


def _bound(found: Record, run: Run) -> float:
    """Up to what losses agree; refuse what no bound can be given for."""
    if run.device == found.device:
        return TOLERANCE
    if found.drawn or run.drawn:
        raise ConfigError(
            f"the script draws random numbers on its device (dropout, noise, weights), and "
            f"{run.device} draws others than {found.device}. Record and compare on the same kind "
            "of device, or give --args by which it draws none there."
        )
    unknown = [one for one in found.formats if one not in BOUNDS]
    if unknown:
        raise ConfigError(
            f"the record, of {found.device}, computes in {unknown[0]}, of which nothing says how "
            f"near the losses of {run.device} are. Compare on the same kind of device."
        )
    return max(BOUNDS[one] for one in found.formats)


def _about(found: Record, run: Run, bound: float) -> str:
    """What the comparison is between, and why it is as exact as it is."""
    lines = [f"recorded on {found.device} in {', '.join(found.formats)}, run on {run.device}"]
    if run.device != found.device:
        lines.append(
            f"losses of two devices are compared up to {bound:g}, since they sum in "
            f"other orders and approximate functions otherwise; on one it is {TOLERANCE:g}"
        )
    here = {**run.versions, "unipar": __version__}
    others = [
        f"{name} {version}, here {here[name]}" for name, version in found.versions.items()
        if here.get(name, version) != version
    ]  # fmt: skip
    return "\n".join([*lines, *([f"recorded with {'; '.join(others)}"] if others else [])])


def ranks(losses: Losses) -> str:
    """How many ranks computed losses, in words."""
    return f"{len(losses)} rank{'s' if len(losses) > 1 else ''}"


def _shown(value: Any) -> str:
    return repr(" ".join(value)) if isinstance(value, list) else str(value)


def digest_of(data: Mapping[str, Any]) -> str:
    """The SHA-256 of what a record holds."""
    return _digest(json.dumps(data, sort_keys=True).encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
