"""One trial of a benchmark: one cell, trained and measured in a process of its own.

``request.json`` in the directory says what to do; ``answer.json`` or ``failure.json`` says what
came of it.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from unipar.benchmark import modelling, probe, raw
from unipar.benchmark.cells import Cell
from unipar.benchmark.job import BenchJob
from unipar.benchmark.load import of_others
from unipar.benchmark.meter import Meter
from unipar.benchmark.records import RankRecord, Trial
from unipar.benchmark.store import Failure, Finding
from unipar.benchmark.writing import replace
from unipar.errors import ConfigError, UniparError, WorkerError
from unipar.strategy import registry
from unipar.utils.subprocesses import end_with

_NO_MEMORY = ("OutOfMemoryError", "out of memory", "can't allocate memory", "MemoryError")

_LONGEST = 400
"""Characters of a reason that are not unipar's own."""


def measure(job: BenchJob, directory: Path, request: dict[str, Any]) -> Finding:
    """Train one cell, and gather what its ranks have left."""
    from unipar.train.fit import fit

    cell = Cell.model_validate(request["cell"])
    meter = Meter(
        directory,
        warmup=job.warmup,
        steps=job.steps,
        data=job.arguments["data"],
        began=request["began"],
        trace=request["trace"],
        pipeline=registry.resolve(cell.strategy).capabilities().pipeline,
    )
    arguments = job.of(cell, meter.num_steps, callbacks=[meter], output_dir=directory / "run")
    fit(**arguments)
    return gather(directory, request)


def by_hand(job: BenchJob, directory: Path, request: dict[str, Any]) -> Finding:
    """Train one cell by a loop that knows nothing of unipar."""
    cell = Cell.model_validate(request["cell"])
    raw.run(job, cell, Path(request["loop"]), directory, began=request["began"])
    return gather(directory, request)


def gather(directory: Path, request: dict[str, Any]) -> Finding:
    """Put together what the ranks have found."""
    cell = Cell.model_validate(request["cell"])
    ranks = [RankRecord.read(directory, rank) for rank in range(cell.devices)]
    first = ranks[0]
    trial = Trial(
        repeat=request["repeat"],
        losses=first.losses,
        setup_seconds=max(one.setup_seconds for one in ranks),
        first_step_seconds=max(one.first_step_seconds for one in ranks),
        ranks=[one.rank for one in ranks],
        load=of_others([one.usage for one in ranks if one.usage]),
    )
    return Finding(
        trial=trial,
        items=first.items,
        samples=first.samples,
        parameters=first.parameters,
        optimizer=first.optimizer,
        copies=first.copies,
        sharded=registry.resolve(cell.strategy).capabilities().sharded,
        environment=sys.executable,
    )


def explain(error: BaseException) -> Failure:
    """Explain what became of a trial that raised."""
    told = f"{type(error).__name__}: {error}"
    if isinstance(error, WorkerError):
        told += error.worker_traceback
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(
        sign in told for sign in _NO_MEMORY
    ):
        status = "out of memory"
    else:
        status = "refused" if isinstance(error, ConfigError) else "failed"
    text = str(error) if isinstance(error, UniparError) else told
    if not isinstance(error, UniparError) or getattr(error, "worker_traceback", ""):
        text = _first_line(text)
    return Failure(status=status, reason=text.strip(), environment=sys.executable)


def _first_line(text: str) -> str:
    """What a foreign error says first; some go on with the whole model, or with a traceback."""
    line, *more = text.strip().splitlines()
    if not more and len(line) <= _LONGEST:
        return line
    return f"{line[:_LONGEST].rstrip('( ')} … (the rest is in the trial's log.txt)"


KINDS: dict[str, Callable[[BenchJob, Path, dict[str, Any]], Any]] = {
    "measure": measure,
    "by hand": by_hand,
    "probe": probe.answer,
    "model": modelling.answer,
}


def main(job: Path, directory: Path) -> int:
    """Do what is asked for, leave what came of it, and return the exit code."""
    request = json.loads((directory / "request.json").read_text())
    end_with(os.getppid())
    try:
        answer = KINDS[request["kind"]](BenchJob.read(job), directory, request)
    except Exception as error:
        traceback.print_exc()
        replace(directory / "failure.json", explain(error).model_dump_json(indent=1))
        return 1
    replace(directory / "answer.json", answer.model_dump_json(indent=1))
    return 0
