"""The page of a benchmark: what it holds, and what it says of what is not there."""

from __future__ import annotations

import json
import random
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from synthetic_bench import bench_result, failed, measured

from unipar.benchmark.cells import Cell
from unipar.benchmark.report import html
from unipar.benchmark.report.charts import CHARTS
from unipar.benchmark.report.charts.drawing import Chart, Missing
from unipar.benchmark.result import BenchResult, Parity
from unipar.benchmark.statistics import Spread
from unipar.errors import ConfigError


@pytest.fixture(scope="module")
def result() -> BenchResult:
    return bench_result()


@pytest.fixture(scope="module")
def page(result: BenchResult) -> str:
    return html.render(result)


def only(*cells, **changes) -> BenchResult:
    empty = {"scaling": [], "overhead": [], "interconnect": [], "recommendation": "Pick it."}
    return bench_result().model_copy(update={"cells": list(cells), **empty, **changes})


def drawn(result: BenchResult, key: str) -> Chart | Missing:
    return next(entry.draw(result) for entry in CHARTS if entry.key == key)


def chart(result: BenchResult, key: str) -> Chart:
    found = drawn(result, key)
    assert isinstance(found, Chart), found
    return found


def figure_of(result: BenchResult, key: str) -> Any:
    return chart(result, key).figure


class Words(HTMLParser):
    """The text of a page, and the addresses in it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text: list[str] = []
        self.addresses: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.addresses += [value or "" for key, value in attrs if key in ("src", "href")]

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)

    @property
    def written(self) -> str:
        return " ".join(" ".join(self.text).split())


def test_the_page_has_every_part(page: str, result: BenchResult) -> None:
    written = Words(page).written
    for part in (
        result.recommendation,
        *(entry.title for entry in CHARTS),
        "rank 0 was killed at 31.2 GiB of 32 GiB.",
        "Example Processor 9000, 4 cores",
        "2.13.0+cpu",
        "200 GFLOP/s in fp32 on 2 devices",
        result.job.command,
        "ddp on 2 devices: 1.0",
        "Fastest too close to call: ddp on 4 devices and fsdp on 4 devices",
        "Least memory fsdp on 4 devices, deepspeed:stage=3 on 4 devices and",
        "Wrong horovod on 4 devices (by 2.9e-02 from single)",
    ):
        assert part in written, part
    assert "Not complete" not in written
    assert "Run file" not in written


def test_the_run_file_and_the_commit_are_on_the_page(result: BenchResult) -> None:
    job = result.job.model_copy(update={"run_file": "model: job:<build>", "commit": "0123abcd"})
    written = Words(html.render(result.model_copy(update={"job": job}))).written
    assert "Run file model: job:<build>" in written
    assert "commit 0123abcd" in written


def test_one_that_was_interrupted_says_so_above_what_it_found(result: BenchResult) -> None:
    broken = result.model_copy(update={"interrupted": "it was ended by SIGTERM"})
    written = Words(html.render(broken)).written
    told = "Not complete: it was ended by SIGTERM after 48 of 57 trials."
    assert 0 < written.index(told) < written.index(result.recommendation)


def test_above_so_many_cells_charts_show_the_best_and_fold_the_rest(result: BenchResult) -> None:
    page = html.render(result)
    data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert data
    figures = json.loads(data[1])["figures"]
    assert len(result.measured) > html.FOLD
    assert len(figures["step-times"]["data"]) == html.FOLD
    assert len(figures["whole-step-times"]["data"]) == len(result.measured)
    shown = [trace["name"] for trace in figures["step-times"]["data"]]
    assert shown[0].startswith("ddp")
    assert "horovod on 4" not in shown
    few = only(*result.measured[: html.FOLD])
    assert "<details" not in html.render(few)


def test_the_page_refers_to_nothing_outside(page: str) -> None:
    addresses = Words(page).addresses
    assert [one for one in addresses if not one.startswith("#")] == ["data:,"]
    assert "default-src 'none'" in page
    packed = page.count("http") - page.count("http-equiv")
    assert packed <= page.count("http://www.w3.org/2000/svg")


def test_plotly_is_there_once_and_packed(page: str) -> None:
    assert page.count('id="plotly"') == 1
    assert len(page) < 3_000_000


def test_names_cannot_end_a_tag_or_a_script() -> None:
    evil = "x:y=</script><b>&amp;"
    cell = measured(Cell(strategy=evil, devices=1), 0.1, random.Random(0))
    other = failed(Cell(strategy="z"), "failed", "<img src=http://example.invalid>")
    page = html.render(only(cell, other, recommendation="<i>Pick</i> $this"))
    found = Words(page)
    assert not {"b", "img", "i"} & set(found.open)
    assert "<i>Pick</i> $this" in found.written
    assert "</script><b>" not in page
    figures = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert figures
    names = {one["name"] for one in json.loads(figures[1])["figures"]["losses"]["data"]}
    assert names == {"x:y=&lt;/script&gt;&lt;b&gt;&amp;amp; on 1"}


def test_throughput_has_the_medians_and_the_spread_of_the_repeats(result: BenchResult) -> None:
    two = next(trace for trace in figure_of(result, "throughput").data if trace.name == "2 devices")
    ddp = next(cell for cell in result.cells if cell.cell == Cell(strategy="ddp", devices=2))
    assert ddp.items_per_second
    place = list(two.customdata).index("ddp")
    assert two.x[place] == ddp.items_per_second.median
    high = ddp.items_per_second.p95 - ddp.items_per_second.median
    assert two.error_x.array[place] == pytest.approx(high)


def test_amdahls_law_starts_at_one_and_passes_where_it_should(result: BenchResult) -> None:
    traces = figure_of(result, "speedup").data
    law = next(trace for trace in traces if trace.name == "Amdahl, serial 22.0%")
    assert (law.x[0], law.y[0]) == (1, 1)
    assert law.x[-1] == 4
    assert law.y[-1] == pytest.approx(1 / (0.22 + 0.78 / 4))
    share = figure_of(result, "efficiency").data
    assert share[2].y[-1] == pytest.approx(100 * traces[2].y[-1] / 4)


def test_where_nothing_gains_no_serial_fraction_is_claimed(result: BenchResult) -> None:
    slowed = [
        one.model_copy(
            update={"speedup": [1 / count for count in one.devices], "serial_fraction": 7.0}
        )
        for one in result.scaling
    ]
    chart = drawn(result.model_copy(update={"scaling": slowed}), "speedup")
    assert isinstance(chart, Chart)
    assert re.search(r"None gains: \w+ loses least, with 0\.25 times on 4 devices\.", chart.alt)
    traces: Any = chart.figure.data
    assert {one.name for one in traces if "Amdahl" in one.name} == {"Amdahl, no gain"}


def test_memory_stacks_up_to_what_a_rank_holds_with_the_formula_below(result: BenchResult) -> None:
    figure = figure_of(result, "memory-by-kind")
    names = list(figure.layout.yaxis.ticktext)
    place = names.index("ddp on 4")
    assert names[place + 1] == "by formula"
    ddp = next(cell for cell in result.cells if cell.cell == Cell(strategy="ddp", devices=4))
    held = max(rank.memory.tensors for rank in ddp.trials[0].ranks if rank.memory)
    stack = sum(trace.x[place] for trace in figure.data if trace.type == "bar")
    assert stack == pytest.approx(held / 2**20)
    assert ddp.predicted
    formula = sum(trace.x[place + 1] for trace in figure.data if trace.type == "bar")
    assert formula == pytest.approx(ddp.predicted.tensors / 2**20)


def test_memory_by_rank_has_a_line_for_every_rank(result: BenchResult) -> None:
    names = list(figure_of(result, "memory-by-rank").layout.yaxis.ticktext)
    assert [one for one in names if one.startswith("fsdp")] == [f"fsdp rank {n}" for n in range(4)]


def test_traffic_adds_up(result: BenchResult) -> None:
    figure = figure_of(result, "traffic")
    place = list(figure.layout.yaxis.ticktext).index("fsdp on 4")
    by_kind = {trace.name: trace.x[place] for trace in figure.data}
    parameters = 4 * result.job.parameters / 2**20
    assert by_kind == pytest.approx(
        {"all-reduce": 0.0, "all-gather": 2 * parameters, "reduce-scatter": parameters}
    )


def test_what_is_exposed_and_what_is_hidden_make_all_communication(result: BenchResult) -> None:
    figure = figure_of(result, "exposure")
    names = list(figure.layout.yaxis.ticktext)
    assert not [name for name in names if name.startswith(("single", "horovod"))]
    fsdp = next(one for one in result.cells if one.cell == Cell(strategy="fsdp", devices=4))
    seen = fsdp.trials[0].ranks[0].overlap
    assert seen is not None
    bars = {trace.name: trace.x[names.index("fsdp on 4")] for trace in figure.data}
    assert sum(bars.values()) == pytest.approx(1e3 * seen.communication)
    assert bars["exposed"] == pytest.approx(1e3 * seen.exposed)
    assert "exposes most of it, 75%" in chart(result, "exposure").alt


def test_differences_are_drawn_unless_every_bit_is_equal(result: BenchResult) -> None:
    assert "horovod on 4 drifts." in chart(result, "loss-differences").alt
    single = measured(Cell(strategy="single"), 0.1, random.Random(0))
    parity = Parity(reference="single", difference=0.0, allowed=1e-5, drifts=False)
    twin = measured(Cell(strategy="ddp"), 0.1, random.Random(0), parity=parity)
    equal = twin.model_copy(
        update={
            "trials": [
                one.model_copy(update={"losses": other.losses})
                for one, other in zip(twin.trials, single.trials, strict=True)
            ]
        }
    )
    found = drawn(only(single, equal), "loss-differences")
    assert found == Missing("every loss equals its reference's in every bit.")


def test_a_reference_that_is_no_cell_is_compared_with_all_the_same() -> None:
    parity = Parity(reference="single", difference=0.5, allowed=1e-5, drifts=True)
    ddp = measured(Cell(strategy="ddp"), 0.1, random.Random(0), parity=parity)
    losses = [2 * loss for loss in ddp.trials[0].losses]
    kept = only(ddp, reference_losses={"single": losses})
    assert set(figure_of(kept, "loss-differences").data[0].y) == {0.5}
    assert isinstance(drawn(only(ddp), "loss-differences"), Missing)


def test_a_loss_that_is_no_number_survives_the_file_and_is_drawn_without_it(
    tmp_path: Path,
) -> None:
    parity = Parity(reference="single", difference=float("inf"), allowed=1e-5, drifts=True)
    single = measured(Cell(strategy="single"), 0.1, random.Random(0))
    ddp = measured(Cell(strategy="ddp"), 0.1, random.Random(0), parity=parity)
    losses = [*ddp.trials[0].losses[:-1], float("nan")]
    trials = [ddp.trials[0].model_copy(update={"losses": losses})]
    result = only(single, ddp.model_copy(update={"trials": trials}))
    result.save(tmp_path / "result.json")
    again = BenchResult.load(tmp_path)
    assert again.cells[1].parity == parity
    page = html.render(again)
    assert 'data-value="Infinity">not finite!' in page
    found = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    assert "NaN" not in found[1]


def test_what_a_pipeline_idles_is_in_the_table_and_survives_the_file(tmp_path: Path) -> None:
    piped = measured(
        Cell(strategy="mesh:pp=2", devices=2),
        0.1,
        random.Random(0),
        bubble=Spread.of([0.245]),
        bubble_formula=0.2,
    )
    result = only(piped)
    result.save(tmp_path / "result.json")
    again = BenchResult.load(tmp_path)
    assert (again.cells[0].bubble, again.cells[0].bubble_formula) == (Spread.of([0.245]), 0.2)
    written = Words(html.render(again)).written
    assert "bubble %" in written
    assert "bubble by formula %" in written
    assert "24.5 20.0" in written
    assert "bubble" not in Words(html.render(bench_result())).written


def test_one_cell_alone_draws_what_it_can_and_says_what_is_left_out() -> None:
    alone = measured(Cell(strategy="ddp"), 0.1, random.Random(0), parity=None)
    written = Words(html.render(only(alone))).written
    for lack in (
        "Speed-up: no strategy was measured on several numbers of devices.",
        "Memory by rank: no cell with several ranks was measured.",
        "Interconnect: the interconnect was not measured, as with one device.",
        "Bytes communicated: no collective was recorded.",
        "Loss differences: there is no reference to compare a loss with.",
    ):
        assert lack in written, lack


def test_a_page_without_a_measurement_has_reasons_and_no_chart() -> None:
    cell = failed(Cell(strategy="fsdp", devices=2), "time limit", "no step for 60 s.")
    page = html.render(only(cell))
    assert 'class="chart"' not in page
    written = Words(page).written
    assert "no step for 60 s." in written
    assert written.count("Throughput: no cell was measured.") == 1


def test_without_plotly_the_command_that_mends_it_is_named(
    result: BenchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'unipar[bench]'")):
        html.render(result)


def test_a_path_that_cannot_be_written_is_said(result: BenchResult, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the report cannot be written to"):
        html.write(result, tmp_path / "nowhere" / "report.html")
    html.write(result, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
