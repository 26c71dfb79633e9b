"""``unipar bench compare`` on stored results: what is printed, and the exit code."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic_bench import bench_result

from unipar.cli import main


@pytest.fixture
def stored(tmp_path: Path) -> tuple[str, str]:
    """Two benchmarks; in the second one ``fsdp`` is a fifth slower."""
    for name, result in (
        ("before", bench_result()),
        ("after", bench_result(slower={"fsdp": 1.2}, seed=1)),
    ):
        (tmp_path / name).mkdir()
        result.save(tmp_path / name / "result.json")
    return str(tmp_path / "before"), str(tmp_path / "after")


def test_the_exit_code_says_what_became_of_it(
    stored: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = stored
    assert main(["bench", "compare", before, after]) == 1
    assert "fsdp" in capsys.readouterr().out
    assert main(["bench", "compare", before, before]) == 0
    assert main(["bench", "compare", before, after, "--fail-on", "failed,drift"]) == 0
    assert main(["bench", "compare", before, after, "--fail-on", "none"]) == 0
    assert main(["bench", "compare", before, after, "--fail-on", "slow"]) == 2
    assert "there is no 'slow'" in capsys.readouterr().err


def test_a_tenfold_slowdown_at_one_repeat_is_not_green(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, slower in (("before", 1.0), ("after", 10.0)):
        result = bench_result(slower=dict.fromkeys(("ddp", "fsdp"), slower))
        cells = [one.model_copy(update={"trials": one.trials[:1]}) for one in result.cells]
        job = result.job.model_copy(update={"repeats": 1})
        (tmp_path / name).mkdir()
        result = result.model_copy(update={"cells": cells, "job": job})
        result.save(tmp_path / name / "result.json")
    command = ["bench", "compare", str(tmp_path / "before"), str(tmp_path / "after")]
    assert main(command) == 3
    said = " ".join(capsys.readouterr().out.split())
    assert "Cannot tell" in said
    assert "Run it again with the same --output and --repeats 5" in said


def test_a_directory_of_runs_is_one_side(
    stored: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(2):
        (tmp_path / "runs" / str(number)).mkdir(parents=True)
        bench_result(seed=number).save(tmp_path / "runs" / str(number) / "result.json")
    both = str(tmp_path / "runs")
    assert main(["bench", "compare", both, both]) == 0
    assert "Nothing became worse" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["table", "markdown", "csv"])
def test_every_format_names_what_changed(
    stored: tuple[str, str], form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "compare", *stored, "--format", form]) == 1
    assert "fsdp" in capsys.readouterr().out


def test_what_is_no_result_is_refused(
    tmp_path: Path, stored: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "compare", stored[0], str(tmp_path / "nowhere")]) == 2
    assert "cannot be read as a benchmark's result" in " ".join(capsys.readouterr().err.split())
