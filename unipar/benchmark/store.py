"""The directory of a benchmark: what has been run in it, so that nothing is run twice."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from unipar.benchmark.cells import Cell
from unipar.benchmark.records import Trial
from unipar.benchmark.result import Status
from unipar.benchmark.writing import replace
from unipar.errors import ConfigError


class Finding(BaseModel, ser_json_inf_nan="constants"):
    """The findings of one trial, as its processes leave it.

    Attributes:
        trial: times, losses, memory and traffic.
        items: what the loss of one step is a mean over, on average over the timed steps.
        samples: likewise, samples.
        parameters: elements of the model.
        optimizer: the class of the optimizer; empty where nobody has looked.
        copies: whether the optimizer updates copies of the parameters.
        sharded: what the strategy divides among ranks, as its capabilities name it.
        environment: the Python that ran it.
    """

    trial: Trial
    items: float
    samples: float
    parameters: int
    optimizer: str = ""
    copies: bool = False
    sharded: frozenset[str] = frozenset()
    environment: str = ""


class Failure(BaseModel):
    """Why a trial found nothing."""

    status: Status
    reason: str
    environment: str = ""


class Store:
    """Files of one benchmark.

    ``plan.json`` says which job it is, ``cells.json`` what was ever asked for, ``trials/`` holds a
    directory for each trial with its output in ``log.txt``, ``probes/`` what was measured of the
    machine.

    Args:
        root: the directory.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.job = root / "job.pkl"

    @classmethod
    def open(cls, root: Path, job: dict[str, Any]) -> Store:
        """Make the directory, or go on in it.

        Args:
            root: where.
            job: what tells one job from another, in JSON's types.

        Raises:
            ConfigError: it cannot be written, holds something else, or another job's results.
        """
        plan = root / "plan.json"
        try:
            if root.is_dir() and not plan.exists() and any(root.iterdir()):
                raise ConfigError(
                    f"{root} holds files that are no benchmark's. Name a new directory, or an "
                    "earlier benchmark's to go on with it."
                )
            root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=root):
                pass
            if plan.exists():
                _check_same(json.loads(plan.read_text()), job, root)
            else:
                plan.write_text(json.dumps(job, indent=1, default=str))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the benchmark's directory {root} cannot be used: {error}. Name another by "
                "--output, or change its permissions."
            ) from error
        return cls(root)

    def ask(self, cells: Sequence[Cell]) -> list[Cell]:
        """Add what is asked for now to what was before; returns all of it."""
        file = self.root / "cells.json"
        known = json.loads(file.read_text()) if file.exists() else []
        every = list(dict.fromkeys([*(Cell.model_validate(one) for one in known), *cells]))
        replace(file, json.dumps([cell.model_dump() for cell in every], indent=1))
        return every

    def answers(self) -> dict[str, dict[str, Any]]:
        """Every measurement of the machine or of the job that was finished, by its name."""
        files = sorted(
            (self.root / "probes").glob("*/answer.json"), key=lambda one: one.stat().st_mtime
        )
        return {file.parent.name: json.loads(file.read_text()) for file in files}

    def trial(self, cell: Cell, repeat: int) -> Path:
        """The directory of one trial."""
        return self.root / "trials" / cell.key / str(repeat)

    def probe(self, name: str) -> Path:
        """The directory of one measurement of the machine or of the job."""
        return self.root / "probes" / name

    def finding(self, cell: Cell, repeat: int) -> Finding | None:
        """Read the findings of an earlier trial, if it was finished."""
        file = self.trial(cell, repeat) / "answer.json"
        return Finding.model_validate_json(file.read_text()) if file.exists() else None

    def findings(self, cell: Cell) -> list[Finding]:
        """Read the findings of all finished trials of a cell, by repeat."""
        files = sorted((self.root / "trials" / cell.key).glob("*/answer.json"))
        found = [Finding.model_validate_json(file.read_text()) for file in files]
        return sorted(found, key=lambda finding: finding.trial.repeat)

    def traces(self, cell: Cell) -> list[str]:
        """The Chrome traces of a cell, by rank, as paths in the directory."""
        files = sorted(self.trial(cell, 0).glob("trace-rank*.json.gz"))
        return [str(file.relative_to(self.root)) for file in files]

    def failure(self, cell: Cell) -> Failure | None:
        """Why the last trial of a cell found nothing, if it did not."""
        files = sorted((self.root / "trials" / cell.key).glob("*/failure.json"))
        return Failure.model_validate_json(files[-1].read_text()) if files else None


def fresh(directory: Path) -> Path:
    """The directory, without what an unfinished trial has left in it."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def _check_same(stored: Any, job: dict[str, Any], root: Path) -> None:
    wanted = json.loads(json.dumps(job, default=str))
    if stored == wanted:
        return
    stored = stored if isinstance(stored, dict) else {}
    keys = [key for key in {**stored, **wanted} if stored.get(key) != wanted.get(key)]
    lines = [f"  {key}: {stored.get(key)!r} there, {wanted.get(key)!r} now" for key in keys]
    raise ConfigError(
        f"{root} holds the results of another job:\n"
        + "\n".join(lines)
        + "\nName another directory by --output, or delete that one."
    )
