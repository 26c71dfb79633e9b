"""What a terminal, Markdown and CSV show of a benchmark."""

from __future__ import annotations

import csv
import io
import random
import re

import pytest
from rich.console import Console
from synthetic_bench import bench_result, failed, measured

from unipar.benchmark.cells import Cell
from unipar.benchmark.report import rows, table, text
from unipar.benchmark.result import BenchResult
from unipar.benchmark.statistics import Spread


def shown(result: BenchResult, width: int) -> str:
    console = Console(width=width, no_color=True, file=io.StringIO(), force_terminal=False)
    with console.capture() as capture:
        console.print(table.terminal(result))
    return capture.get()


def with_cells(*cells) -> BenchResult:
    return bench_result().model_copy(
        update={"cells": list(cells), "scaling": [], "overhead": [], "recommendation": "Pick it."}
    )


@pytest.fixture(scope="module")
def result() -> BenchResult:
    return bench_result()


@pytest.mark.parametrize("width", [80, 120])
def test_every_row_stands_on_the_screen_fastest_first(result: BenchResult, width: int) -> None:
    lines = shown(result, width).splitlines()
    assert max(map(len, lines)) <= width
    body = "\n".join(lines)
    speeds = [
        text.number(cell.items_per_second.median)
        for cell in result.measured
        if cell.items_per_second and not cell.cell.raw
    ]
    places = [body.index(speed) for speed in speeds]
    assert places == sorted(places)
    assert "…" not in body


@pytest.mark.parametrize("width", [80, 120])
def test_what_is_best_tied_and_wrong_is_clear_without_color(
    result: BenchResult, width: int
) -> None:
    body = shown(result, width)
    tied = next(line for line in body.splitlines() if line.strip().startswith("ddp "))
    # None is the best where no winner can be named.
    assert re.search(r"19,\d\d\d~ ", tied)
    clear = shown(bench_result(slower={"fsdp": 1.2}), width)
    fastest = next(line for line in clear.splitlines() if line.strip().startswith("ddp "))
    assert re.search(r"19,\d\d\d\* ", fastest)
    drifting = next(line for line in body.splitlines() if line.strip().startswith("horovod"))
    assert "2.9e-02!" in drifting
    assert "*" not in drifting
    assert "drifts!" in drifting
    assert "! drifts: the loss differs by more than rounding explains" in body
    assert "ddp and fsdp on 2 devices" in body
    assert "ddp on 2 devices: 1.0" in body


def test_long_names_are_cut_where_an_option_begins(result: BenchResult) -> None:
    assert "\ncolossalai: " in re.sub("\n ", "\n", shown(result, 80))
    assert "plugin=gemini" in shown(result, 80)
    assert "colossalai:plugin=gemini " in shown(result, 120)


def test_failures_and_the_recommendation_come_last(result: BenchResult) -> None:
    body = shown(result, 120)
    reason = "colossalai:plugin=gemini on 1 device, out of memory: rank 0 was killed at 31.2 GiB"
    assert body.index("Not measured") < body.index(reason) < body.index("Too close to call")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_what_failed_or_drifts_is_a_row_however_narrow_the_screen_is(
    result: BenchResult, width: int
) -> None:
    lines = shown(result, width).splitlines()
    assert max(map(len, lines)) <= width
    own = [line.split() for line in lines]
    assert ["horovod", "4", "drifts!"] in [words[:3] for words in own]
    assert ["single", "2", "refused"] in own
    assert any(words[-3:] == ["1", "out", "of"] or words[-2:] == ["of", "memory"] for words in own)


def test_what_there_is_no_room_for_is_named(result: BenchResult) -> None:
    narrow = " ".join(shown(result, 80).split())
    assert "There is no room here for spread and p5-p95: see table.csv." in narrow
    assert "There is no room" not in shown(result, 200)


def test_the_answers_stand_below_the_table(result: BenchResult) -> None:
    body = " ".join(shown(result, 120).split())
    assert "Fastest: too close to call: ddp on 4 devices and fsdp on 4 devices" in body
    assert "Least memory: fsdp on 4 devices, deepspeed:stage=3 on 4 devices and colossal" in body
    assert "Wrong: horovod on 4 devices (by 2.9e-02 from single)" in body
    assert "Failed: colossalai:plugin=gemini on 1 device (out of memory)" in body
    assert "Noise: repeats spread by up to 3 %" in body
    clear = " ".join(shown(bench_result(slower={"fsdp": 1.2}), 120).split())
    assert re.search(r"Fastest: ddp on 4 devices, 19,\d\d\d tokens/s", clear)


def test_one_that_was_interrupted_says_so_first(result: BenchResult) -> None:
    told = "Not complete: it was interrupted after 48 of 57 trials."
    broken = result.model_copy(update={"interrupted": "it was interrupted"})
    assert shown(broken, 80).startswith(told)
    assert table.markdown(broken).startswith(f"**{told}")


def test_the_speed_of_a_model_is_its_operations_over_its_step(result: BenchResult) -> None:
    ddp = next(cell for cell in result.cells if cell.cell == Cell(strategy="ddp", devices=4))
    assert ddp.step_seconds
    assert result.job.flops
    expected = result.job.flops / ddp.step_seconds.median
    assert result.row(ddp)["flops_per_second"] == expected
    assert f" {text.number(expected / 1e12)} " in shown(result, 120)


def test_only_what_has_several_in_a_sample_is_called_a_token(result: BenchResult) -> None:
    assert " tokens/s " in shown(result, 120)
    job = result.job.model_copy(update={"items": 8.0})
    plain = shown(result.model_copy(update={"job": job}), 120)
    assert " items/s " in plain
    assert "tokens/s" not in plain


def test_a_column_without_a_figure_is_left_out() -> None:
    alone = measured(Cell(strategy="ddp"), 0.1, random.Random(0), mfu=None, parity=None)
    titles = [column.title for column in rows.of(with_cells(alone)).columns]
    assert titles[7:] == ["peak", "traffic"]
    assert titles[:7] == ["strategy", "devices", "step", "p5-p95", "spread", "tokens/s", "TFLOP/s"]


def with_a_pipeline() -> BenchResult:
    piped = measured(
        Cell(strategy="mesh:pp=2", devices=2),
        0.1,
        random.Random(0),
        bubble=Spread.of([0.22, 0.245, 0.3]),
        bubble_formula=0.2,
    )
    return with_cells(measured(Cell(strategy="ddp", devices=2), 0.1, random.Random(0)), piped)


def test_what_a_pipeline_idles_stands_beside_its_formula_and_others_have_none() -> None:
    result = with_a_pipeline()
    found = {column.title: column for column in rows.of(result).columns}
    for title, own in (("bubble", "24.5"), ("bubble by formula", "20.0")):
        assert found[title].unit == "%"
        figures = zip(found["strategy"].figures, found[title].figures, strict=True)
        assert {name.text: one.text for name, one in figures} == {"ddp": "", "mesh:pp=2": own}
    assert re.search(r"mesh:pp=2 .* 24\.5 +20\.0 ", shown(result, 200))
    assert "| bubble % | bubble by formula % |" in table.markdown(result)
    assert "| 24.5 | 20.0 |" in table.markdown(result)
    ddp, piped = csv.DictReader(io.StringIO(table.csv(result)))
    assert (ddp["bubble"], ddp["bubble_formula"]) == ("", "")
    assert (piped["bubble"], piped["bubble_formula"]) == ("0.245", "0.2")
    # However narrow the screen is, what was measured is there.
    for width in (60, 80):
        assert "24.5" in shown(result, width)


def test_a_hand_written_loop_has_no_row_for_it_says_nothing_of_items() -> None:
    cells = [
        measured(Cell(strategy="ddp", devices=2, raw=raw), 0.1, random.Random(0))
        for raw in (False, True)
    ]
    assert [row[0].text for row in rows.of(with_cells(*cells)).rows] == ["ddp"]


def test_one_cell_is_the_best_of_nothing() -> None:
    alone = measured(Cell(strategy="ddp", devices=2), 0.1, random.Random(0))
    assert "*" not in shown(with_cells(alone), 120)


def test_without_a_measurement_there_are_reasons_only() -> None:
    cell = failed(Cell(strategy="fsdp", devices=2), "time limit", "no step for 60 s.")
    body = shown(with_cells(cell), 80)
    assert "items/s" not in body
    assert "fsdp on 2 devices, time limit: no step for 60 s." in body
    assert "Pick it." in body


def test_brackets_in_names_are_no_markup() -> None:
    cell = failed(Cell(strategy="x:y=[bold]"), "failed", "[/red] stood there.")
    body = shown(with_cells(cell), 100)
    assert "x:y=[bold] on 1 device, failed: [/red] stood there." in body


def test_markdown_is_one_table_and_lists(result: BenchResult) -> None:
    body = table.markdown(result)
    lines = [line for line in body.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + sum(not cell.cell.raw for cell in result.cells)
    assert {line.count("|") for line in lines} == {13}
    assert re.search(r"^\| `ddp` \| 4 \|  \| [\d.]+ \|", body, re.MULTILINE)
    assert re.search(r"^\| `horovod` \| 4 \| \*\*drifts\*\* \|", body, re.MULTILINE)
    assert re.search(r"^\| `single` \| 2 \| \*\*refused\*\* \|", body, re.MULTILINE)
    assert "2.9e-02 **drifts**" in body
    assert "- single on 2 devices, refused: strategy 'single' runs on 1 process, not on 2." in body
    assert body.index(result.recommendation) < body.index("- Fastest: too close to call: ddp on 4")


def test_bars_and_line_breaks_do_not_end_a_markdown_cell() -> None:
    cell = failed(Cell(strategy="ddp"), "failed", "a | b\nc")
    assert r"- ddp on 1 device, failed: a \| b c" in table.markdown(with_cells(cell))


def test_csv_has_every_cell_and_every_digit(result: BenchResult) -> None:
    found = list(csv.DictReader(io.StringIO(table.csv(result))))
    assert len(found) == len(result.cells)
    by_key = {(one["strategy"], one["devices"], one["raw"]): one for one in found}
    ddp = by_key["ddp", "2", "False"]
    cell = next(one for one in result.cells if one.cell == Cell(strategy="ddp", devices=2))
    assert cell.step_seconds
    assert float(ddp["step_seconds"]) == cell.step_seconds.median
    assert (ddp["collectives"], ddp["traffic_bytes"]) == ("3", str(4 * result.job.parameters))
    assert by_key["single", "1", "False"]["traffic_bytes"] == "0"
    assert by_key["single", "2", "False"]["status"] == "refused"


@pytest.mark.parametrize(
    ("value", "written"),
    [(1234567.0, "1,234,567"), (12.345, "12.3"), (1.2345, "1.23"), (0.012345, "0.0123"), (0, "0")],
)
def test_numbers_have_three_digits(value: float, written: str) -> None:
    assert text.number(value) == written


def test_units_fit_what_is_typical() -> None:
    assert text.seconds(0.0123) == "12.3 ms"
    assert text.size(3 << 30) == "3.00 GiB"
    assert text.unit_of_bytes([1 << 10, 5 << 30, 6 << 30]).name == "GiB"
    assert text.unit_of_bytes([None, 0]).name == "B"
