"""Two benchmarks beside each other."""

from __future__ import annotations

import csv
import io
import random
from typing import Any

import pytest
from rich.console import Console
from synthetic_bench import bench_result, failed, measured

from unipar.benchmark.cells import Cell
from unipar.benchmark.compare import compare
from unipar.benchmark.report.comparison import render
from unipar.benchmark.result import BenchResult, CellResult, Parity
from unipar.benchmark.statistics import Estimate
from unipar.errors import ConfigError

DDP = Cell(strategy="ddp", devices=2)


def cell(seconds: float, seed: int = 0, **changes: Any) -> CellResult:
    return measured(DDP, seconds, random.Random(seed), **changes)


def only(*cells: CellResult) -> BenchResult:
    return bench_result().model_copy(update={"cells": list(cells)})


def with_peaks(result: CellResult, factor: float) -> CellResult:
    def scaled(rank: Any) -> Any:
        memory = rank.memory.model_copy(update={"peak": int(rank.memory.peak * factor)})
        return rank.model_copy(update={"memory": memory})

    trials = [
        trial.model_copy(update={"ranks": [scaled(rank) for rank in trial.ranks]})
        for trial in result.trials
    ]
    return result.model_copy(update={"trials": trials})


def shaken(result: CellResult, factors: list[float]) -> CellResult:
    """The same, with each repeat slower by a factor, and otherwise alike."""
    trials = [
        result.trials[0].model_copy(
            update={
                "repeat": repeat,
                "ranks": [
                    rank.model_copy(update={"seconds": [one * factor for one in rank.seconds]})
                    for rank in result.trials[0].ranks
                ],
            }
        )
        for repeat, factor in enumerate(factors)
    ]
    return result.model_copy(update={"trials": trials})


def printed(shown: Any, width: int = 120) -> str:
    console = Console(width=width, no_color=True, file=io.StringIO())
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


def test_the_same_result_has_no_regression() -> None:
    found = compare(bench_result(), bench_result())
    assert found.regressions == []
    assert found.warnings == []
    assert {change.time_verdict for change in found.changes if change.time} == {"same"}
    assert "Nothing became worse beyond the noise." in printed(render(found))


@pytest.mark.parametrize("seed", range(1, 6))
def test_noise_of_another_run_is_no_regression(seed: int) -> None:
    assert compare(bench_result(), bench_result(seed=seed)).regressions == []


def test_what_became_slower_is_named_and_what_became_faster_is_not() -> None:
    after = bench_result(slower={"ddp": 1.1, "fsdp": 0.8}, seed=1)
    found = compare(bench_result(), after)
    assert [one.split(":")[0] for one in found.regressions] == [
        "ddp on 1 device",
        "ddp on 2 devices",
        "ddp on 4 devices",
    ]
    by_cell = {change.cell: change for change in found.changes}
    ratio = by_cell[DDP].time
    assert ratio
    assert ratio.low < 1.1 < ratio.high
    assert by_cell[Cell(strategy="fsdp", devices=2)].time_verdict == "less"
    assert "a step takes 1.1" in found.regressions[1]


def test_a_change_too_small_to_matter_is_none_even_beyond_the_noise() -> None:
    exact = only(cell(0.1))
    slower = cell(0.1)
    trials = [
        trial.model_copy(
            update={
                "ranks": [
                    rank.model_copy(update={"seconds": [one * 1.02 for one in rank.seconds]})
                    for rank in trial.ranks
                ]
            }
        )
        for trial in slower.trials
    ]
    after = only(slower.model_copy(update={"trials": trials}))
    # The same noise on both sides still spreads the interval, as it must: runs are not paired.
    assert compare(exact, after).regressions == []
    change = compare(exact, after, least=0.0).changes[0]
    assert change.time
    assert change.time.median == pytest.approx(1.02)


def test_one_repeat_shows_no_noise_and_marks_nothing() -> None:
    one = cell(0.1)
    two = cell(0.3)
    alone = [item.model_copy(update={"trials": item.trials[:1]}) for item in (one, two)]
    found = compare(only(alone[0]), only(alone[1]))
    assert found.changes[0].time_verdict == "unknown"
    assert found.regressions == []
    body = " ".join(printed(render(found)).split())
    assert "Cannot tell whether these became worse" in body
    assert "Nothing became worse" not in body


def test_noise_that_could_hide_a_regression_is_not_called_the_same() -> None:
    before, after = cell(0.1), shaken(cell(0.1), [0.8, 1.1, 1.6])
    found = compare(only(before), only(after))
    assert found.changes[0].time_verdict == "unknown"
    assert found.undecided == ["ddp on 2 devices"]


def test_runs_of_one_build_that_differ_by_more_than_their_repeats_are_no_regression() -> None:
    before = [only(shaken(cell(0.1), [run] * 3)) for run in (1.00, 1.06, 0.97)]
    after = [only(shaken(cell(0.1), [run] * 3)) for run in (1.05, 1.00, 1.08)]
    # Each run by itself is sure of its time, and two of them would be told apart.
    assert compare(before[0], after[2]).changes[0].time_verdict == "more"
    found = compare(before, after)
    assert found.changes[0].time_verdict in ("same", "unknown")
    assert found.regressions == []
    slower = [only(shaken(cell(0.1), [2 * run] * 3)) for run in (1.05, 1.00, 1.08)]
    assert compare(before, slower).is_worse(["regression"])


def test_runs_are_the_unit_of_memory_too() -> None:
    before = [only(with_peaks(cell(0.1), factor)) for factor in (1.0, 1.3, 1.1)]
    after = [only(with_peaks(cell(0.1), factor)) for factor in (1.3, 1.1, 1.2)]
    assert compare(before[0], after[0]).changes[0].memory_verdict == "more"
    assert compare(before, after).changes[0].memory_verdict == "unknown"


def test_times_beside_other_processes_say_nothing_of_a_build() -> None:
    found = compare(only(cell(0.1)), only(cell(0.2, load=0.7)))
    assert found.regressions == []
    assert found.undecided == ["ddp on 2 devices"]
    assert found.warnings == [
        "other processes had up to 70 % of the cores after: the times of these cells say nothing "
        "of what was changed"
    ]


def test_the_interval_has_what_is_true_most_of_the_time() -> None:
    draw = random.Random(3)
    hits = 0
    for _ in range(40):
        before = [draw.gauss(1.0, 0.02) for _ in range(10)]
        after = [draw.gauss(1.1, 0.02) for _ in range(10)]
        ratio = Estimate.unpaired(after, before)
        hits += ratio.low <= 1.1 <= ratio.high
    assert hits >= 34
    with pytest.raises(ValueError, match="both sides"):
        Estimate.unpaired([], [1.0])


def test_a_cell_that_fails_now_is_a_regression() -> None:
    full = failed(DDP, "out of memory", "it was full.")
    assert compare(only(cell(0.1)), only(full)).regressions == [
        "ddp on 2 devices: it was measured before, and now: out of memory. it was full."
    ]
    found = compare(only(full), only(cell(0.1)))
    assert found.regressions == []
    assert "ddp on 2 devices: out of memory before, measured after." in printed(render(found))


def test_more_memory_is_a_regression() -> None:
    found = compare(only(cell(0.1)), only(with_peaks(cell(0.1), 1.2)))
    assert [one.split(":")[1].split(",")[0] for one in found.regressions] == [
        " the fullest rank holds 362 MiB"
    ]
    assert compare(only(cell(0.1)), only(with_peaks(cell(0.1), 0.8))).regressions == []


def test_a_loss_that_begins_to_drift_is_a_regression() -> None:
    drifts = Parity(reference="single", difference=float("inf"), allowed=1e-5, drifts=True)
    wrong = only(cell(0.1, parity=drifts))
    assert compare(only(cell(0.1)), wrong).regressions == [
        "ddp on 2 devices: its loss drifts by not finite from single"
    ]
    assert compare(wrong, wrong).regressions == []


def test_a_slower_hand_written_loop_is_shown_but_is_not_ours() -> None:
    raw = DDP.model_copy(update={"raw": True})
    before, after = (measured(raw, seconds, random.Random(0)) for seconds in (0.1, 0.2))
    found = compare(only(before), only(after))
    assert found.changes[0].time_verdict == "more"
    assert found.regressions == []


def test_another_job_is_refused_by_what_differs() -> None:
    before = bench_result()
    job = before.job.model_copy(update={"model": "CNN", "global_batch_size": 16})
    with pytest.raises(ConfigError) as caught:
        compare(before, before.model_copy(update={"job": job}))
    assert str(caught.value) == (
        "these are two different jobs, whose times say nothing of each other: model GPT and CNN; "
        "global_batch_size 8 and 16. Compare results of the same run file."
    )


def test_results_without_a_common_cell_are_refused() -> None:
    other = measured(Cell(strategy="fsdp"), 0.1, random.Random(0))
    with pytest.raises(ConfigError, match="before there were ddp on 2 devices, and after fsdp on"):
        compare(only(cell(0.1)), only(other))


def test_another_machine_and_other_versions_are_said_first() -> None:
    before = bench_result()
    machine = before.machine.model_copy(
        update={"cores": 64, "versions": {**before.machine.versions, "torch": "2.14.0"}}
    )
    found = compare(before, before.model_copy(update={"machine": machine}))
    assert found.warnings == [
        "another machine: cores '4' before, '64' after",
        "torch 2.13.0+cpu before, 2.14.0 after",
    ]
    assert printed(render(found)).startswith("Careful: another machine: cores '4' before")
    assert str(render(found, "markdown")).startswith("**Careful**: another machine")


def test_cells_of_one_result_only_are_listed() -> None:
    extra = measured(Cell(strategy="fsdp", devices=4), 0.1, random.Random(0))
    found = compare(only(cell(0.1), extra), only(cell(0.1)))
    assert found.only_before == ["fsdp on 4 devices"]
    assert "Only before: fsdp on 4 devices." in printed(render(found))
    assert compare(only(cell(0.1)), only(cell(0.1), extra)).only_after == ["fsdp on 4 devices"]


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_names_every_strategy_at_any_width(width: int) -> None:
    found = compare(bench_result(), bench_result(slower={"ddp": 1.3}))
    body = printed(render(found), width)
    assert max(map(len, body.splitlines())) <= width
    for word in ("ddp ", "deepspeed:", "stage=3", "plugin=gemini", "slower!", "2.9e-02!"):
        assert word in body, word
    assert body.rstrip().splitlines()[-1].startswith(("  ddp on 4 devices: a step takes", "1.3"))


@pytest.mark.parametrize("width", [40, 60])
def test_a_narrow_table_leaves_columns_out_and_breaks_no_word(width: int) -> None:
    found = compare(bench_result(), bench_result(slower={"ddp": 1.3}))
    body = printed(render(found), width)
    assert max(map(len, body.splitlines())) <= width
    for word in ("ddp ", "deepspeed:", "stage=3", "plugin=gemini", "slower!", "1.300", "dev."):
        assert word in body, word
    assert "There is no room here for" in body


def test_markdown_and_csv_have_the_same_cells() -> None:
    found = compare(bench_result(), bench_result(slower={"ddp": 1.3}))
    lines = [line for line in str(render(found, "markdown")).splitlines() if line.startswith("|")]
    assert len(lines) == 2 + sum(change.time is not None for change in found.changes)
    assert sum("**slower!**" in line for line in lines) == 3
    rows = list(csv.DictReader(io.StringIO(str(render(found, "csv")))))
    assert len(rows) == len(found.changes)
    assert [row["time"] for row in rows if row["strategy"] == "ddp"] == ["slower"] * 3 + ["same"]
    assert float(rows[0]["time_ratio"]) == pytest.approx(1.0, abs=0.05)
