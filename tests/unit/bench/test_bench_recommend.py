"""The sentence that says what to pick."""

from __future__ import annotations

import random

from synthetic_bench import MIB, bench_result, failed, measured

from unipar.benchmark.cells import Cell
from unipar.benchmark.recommend import recommend
from unipar.benchmark.records import Memory
from unipar.benchmark.result import CellResult, Parity, Scaling

PARITY = Parity(reference="single", difference=1e-7, allowed=1e-5, drifts=False)
DRIFTS = Parity(reference="single", difference=0.25, allowed=1e-5, drifts=True)


def cell(
    strategy: str, seconds: float, *, peak: int | None = None, devices: int = 2, **changes
) -> CellResult:
    """Steps of exactly that many seconds, and ``peak`` MiB where it is given."""
    shape = Cell(strategy=strategy, devices=devices, raw=changes.pop("raw", False))
    found = measured(shape, seconds, random.Random(0), **{"parity": PARITY, **changes})
    memory = None
    if peak is not None:
        kinds = dict.fromkeys(("gradients", "optimizer", "activations", "other"), 0)
        memory = Memory(parameters=0, **kinds, peak=peak * MIB)
    trials = [
        trial.model_copy(
            update={"ranks": [one.model_copy(update={"memory": memory}) for one in trial.ranks]}
        )
        for trial in found.trials
    ]
    return found.model_copy(update={"trials": trials})


def test_the_fastest_is_named_with_its_figures_and_the_next() -> None:
    told = recommend([cell("ddp", 0.2, peak=300), cell("fsdp", 0.1, peak=200)], [])
    assert told.startswith("Pick fsdp on 2 devices: 10,")
    assert "ms a step, 200 MiB on the fullest rank" in told
    assert "2.00 times as fast as ddp, the next on as many devices" in told
    assert told.count(".\n") == 0
    assert told.endswith(".")


def test_of_equals_the_one_that_needs_less_memory_wins() -> None:
    ddp = cell("ddp", 0.1, peak=300, ties=["fsdp"])
    fsdp = cell("fsdp", 0.101, peak=200, ties=["ddp"])
    told = recommend([ddp, fsdp], [])
    assert told.startswith("Pick fsdp on 2 devices")
    assert "as fast as ddp (300 MiB) within the noise, and needs the least memory of them" in told


def test_equals_of_unknown_memory_are_called_equals_and_no_more() -> None:
    told = recommend([cell("ddp", 0.1, ties=["fsdp"]), cell("fsdp", 0.101, ties=["ddp"])], [])
    assert told.startswith("Pick ddp on 2 devices")
    assert "as fast as fsdp within the noise" in told
    assert "memory" not in told


def test_a_tie_counts_on_as_many_devices_only() -> None:
    fast = cell("ddp", 0.1, peak=300, ties=["fsdp"])
    told = recommend([fast, cell("fsdp", 0.2, peak=100, devices=1)], [])
    assert told.startswith("Pick ddp on 2 devices")


def test_a_fast_wrong_run_wins_nothing() -> None:
    told = recommend([cell("ddp", 0.2), cell("horovod", 0.1, parity=DRIFTS)], [])
    assert told.startswith("Pick ddp on 2 devices")
    assert "what is faster drifts: horovod on 2 devices (by 2.5e-01 from single)" in told


def test_nothing_is_picked_where_everything_drifts() -> None:
    told = recommend([cell("ddp", 0.2, parity=DRIFTS)], [])
    assert told == (
        "Pick none of these, for every loss drifts: ddp on 2 devices (by 2.5e-01 from single)."
    )


def test_what_memory_forces_is_said() -> None:
    full = [
        failed(Cell(strategy=name, devices=2), "out of memory", "it was full.")
        for name in ("ddp", "horovod")
    ]
    told = recommend([*full, cell("fsdp", 0.2, peak=100)], [])
    assert "nothing else that was tried fits there, for ddp and horovod ran out of memory" in told
    told = recommend([full[0], cell("fsdp", 0.2), cell("zero2", 0.3)], [])
    assert "1.50 times as fast as zero2" in told
    assert "while ddp ran out of memory" in told


def test_a_hand_written_loop_is_never_picked() -> None:
    told = recommend([cell("ddp", 0.05, raw=True), cell("ddp", 0.1)], [])
    assert told.startswith("Pick ddp on 2 devices")


def test_nothing_measured_is_said_with_what_became_of_it() -> None:
    full = failed(Cell(strategy="ddp"), "out of memory", "it was full.")
    refused = [failed(Cell(strategy=name), "refused", "no.") for name in ("a", "b")]
    assert recommend([full, *refused], []) == (
        "Nothing was measured: 1 out of memory and 2 refused."
    )
    assert recommend([], []) == "Nothing was measured: there was nothing to run."


def test_a_loss_that_was_compared_with_nothing_is_said() -> None:
    told = recommend([cell("ddp", 0.1, parity=None)], [])
    assert told.endswith("its loss could be compared with nothing.")
    told = recommend([cell("single", 0.1, parity=None, devices=1), cell("ddp", 0.2)], [])
    assert "compared with nothing" not in told


def test_scaling_is_told_both_ways() -> None:
    scaling = Scaling(
        label="ddp",
        devices=[1, 2, 4],
        seconds=[0.2, 0.1, 0.15],
        speedup=[1.0, 2.0, 1.33],
        efficiency=[1.0, 1.0, 0.33],
        serial_fraction=0.1,
        modelled=[None, None, None],
    )
    told = recommend([cell("ddp", 0.1), cell("ddp", 0.15, devices=4)], [scaling])
    assert "2.00 times its speed on 1 device; more devices make it no faster" in told


def test_the_whole_of_a_realistic_benchmark() -> None:
    told = bench_result().recommendation
    assert told.startswith("Pick fsdp on 4 devices: 19,")
    assert "as fast as ddp (289 MiB) within the noise, and needs the least memory of them" in told
    assert "what is faster drifts: horovod on 4 devices" in told
