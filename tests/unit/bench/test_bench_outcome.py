"""What the exit code of a benchmark says."""

from __future__ import annotations

import random

from synthetic_bench import bench_result, failed, measured

from unipar.benchmark.cells import Cell
from unipar.benchmark.outcome import problems
from unipar.benchmark.result import BenchResult, Parity

DRIFTS = Parity(reference="single", difference=0.25, allowed=1e-5, drifts=True)


def only(*cells) -> BenchResult:
    return bench_result().model_copy(update={"cells": list(cells)})


def fine(strategy: str, devices: int = 2, **changes):
    return measured(Cell(strategy=strategy, devices=devices), 0.1, random.Random(0), **changes)


def test_what_was_asked_for_and_failed_or_drifts_is_named() -> None:
    full = failed(Cell(strategy="fsdp", devices=2), "out of memory", "it was full.")
    result = only(fine("ddp"), fine("horovod", parity=DRIFTS), full)
    asked = ["ddp", "horovod", "fsdp"]
    both = ["horovod on 2 devices drifts", "fsdp on 2 devices: out of memory"]
    assert problems(result, asked, ["failed", "drift"]) == both
    assert problems(result, asked, ["drift"]) == both[:1]
    assert problems(result, asked, []) == []
    # Of a larger request before this one.
    assert problems(result, ["ddp"], ["failed", "drift"]) == []


def test_a_shape_that_a_strategy_has_not_is_no_failure_and_a_strategy_that_never_ran_is() -> None:
    shape = failed(Cell(strategy="single", devices=2), "refused", "on one process only.")
    result = only(fine("single", devices=1), shape, fine("ddp"))
    assert problems(result, ["single", "ddp"], ["failed"]) == []
    absent = failed(Cell(strategy="horovod", devices=2), "refused", "not installed.")
    found = problems(only(fine("ddp"), absent), ["ddp", "horovod"], ["failed"])
    assert found == ["horovod on 2 devices: refused"]


def test_that_nothing_was_measured_always_counts() -> None:
    cell = failed(Cell(strategy="ddp"), "failed", "it crashed.")
    assert problems(only(cell), ["ddp"], []) == ["nothing was measured"]
