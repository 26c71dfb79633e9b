"""The sentence that says what to pick."""

from __future__ import annotations

import random

from synthetic_bench import MIB, bench_result, failed, measured

from unipar.benchmark.cells import Cell
from unipar.benchmark.recommend import judge, recommend
from unipar.benchmark.records import Memory
from unipar.benchmark.result import CellResult, Parity, Scaling
from unipar.benchmark.statistics import Spread

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


def timed(strategy: str, seconds: list[float]) -> CellResult:
    """One repeat for each of these medians."""
    found = cell(strategy, 1.0)
    trials = [
        found.trials[0].model_copy(
            update={
                "repeat": repeat,
                "ranks": [
                    one.model_copy(update={"seconds": [median]}) for one in found.trials[0].ranks
                ],
            }
        )
        for repeat, median in enumerate(seconds)
    ]
    speed = Spread.of([1 / median for median in seconds])
    return found.model_copy(update={"trials": trials, "items_per_second": speed})


def test_the_fastest_is_named_with_its_figures_and_the_next() -> None:
    told = recommend([cell("ddp", 0.2, peak=300), cell("fsdp", 0.1, peak=200)], [])
    assert told.startswith("Pick fsdp on 2 devices: 10,")
    assert "ms a step, 200 MiB on the fullest rank" in told
    assert "2.00 times as fast as ddp, the next on as many devices" in told
    assert told.count(".\n") == 0
    assert told.endswith(".")


def test_of_equals_none_is_picked_and_the_one_that_needs_less_memory_is_named() -> None:
    cells = [cell("ddp", 0.1, peak=300), cell("fsdp", 0.101, peak=200)]
    assert judge(cells, []).winner is None
    assert recommend(cells, []) == (
        "Too close to call: ddp on 2 devices (300 MiB) and fsdp on 2 devices (200 MiB) differ by "
        "no more than two runs of one program do. Of these fsdp on 2 devices holds least. Choose "
        "by memory, or tell smaller differences by more --repeats with the same --output."
    )


def test_equals_of_unknown_memory_are_called_equals_and_no_more() -> None:
    told = recommend([cell("ddp", 0.1), cell("fsdp", 0.101)], [])
    assert told.startswith("Too close to call: ddp on 2 devices and fsdp on 2 devices differ")
    assert "holds least" not in told


def test_more_devices_that_gain_nothing_are_no_winner() -> None:
    told = recommend([cell("ddp", 0.1), cell("ddp", 0.099, devices=4)], [])
    assert told.startswith("Too close to call: ddp on 4 devices and ddp on 2 devices differ")


def test_intervals_that_overlap_name_no_winner() -> None:
    # As on a busy machine: the one that is faster by the median was slower in one round of three.
    calm = timed("ddp", [0.100, 0.110, 0.105])
    shaken = timed("fsdp", [0.130, 0.100, 0.150])
    told = recommend([calm, shaken], [])
    assert told.startswith("Too noisy to name a winner: a step of fsdp on 2 devices takes 0.")
    assert "times as long as one of ddp on 2 devices (95 % interval)" in told
    assert "Run it again with the same --output and --repeats 6" in told


def test_two_repeats_name_no_winner_however_far_apart_the_two_are() -> None:
    cells = [timed("ddp", [0.1, 0.1]), timed("fsdp", [0.6, 0.6])]
    assert recommend(cells, []) == (
        "Too noisy to name a winner: 2 repeats show too little of the noise. Run it again with the "
        "same --output and --repeats 5 (what is finished is kept), and nothing else on the machine."
    )
    alone = [timed("ddp", [0.1]), timed("fsdp", [0.6])]
    assert "1 repeat shows too little" in recommend(alone, [])


def test_a_busy_machine_names_no_winner() -> None:
    busy = cell("ddp", 0.1, load=0.63)
    told = recommend([busy, cell("fsdp", 0.2, load=0.1)], [])
    assert told == (
        "Too noisy to name a winner: other processes had up to 63 % of the cores meanwhile. End "
        "what else runs on this machine, and run it again with --repeats 5 and a new --output."
    )
    assert recommend([cell("ddp", 0.1, load=0.2), cell("fsdp", 0.2)], []).startswith("Pick ddp")


def test_more_than_devices_can_give_names_no_winner() -> None:
    scaling = Scaling(
        label="ddp",
        devices=[1, 2],
        seconds=[1.324, 0.1],
        speedup=[1.0, 13.24],
        efficiency=[1.0, 6.62],
        serial_fraction=0.0,
        modelled=[None, None],
    )
    told = recommend([cell("ddp", 0.1), cell("fsdp", 0.2)], [scaling])
    assert "an efficiency of 662 % (ddp on 2 devices) is more than devices can give" in told
    assert judge([cell("ddp", 0.1), cell("fsdp", 0.2)], [scaling]).winner is None


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
    result = bench_result()
    assert result.winner is None
    told = result.recommendation
    assert told.startswith("Too close to call: ddp on 4 devices (289 MiB) and fsdp on 4 devices (")
    assert "Of these fsdp on 4 devices holds least." in told
    assert "What is faster drifts: horovod on 4 devices" in told
    clear = bench_result(slower={"fsdp": 1.2, "horovod": 1.2})
    assert clear.winner == Cell(strategy="ddp", devices=4)
    assert clear.recommendation.startswith("Pick ddp on 4 devices: 19,")
