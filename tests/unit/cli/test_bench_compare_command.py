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


def test_a_regression_fails_only_where_it_is_asked_to(
    stored: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = stored
    assert main(["bench", "compare", before, after]) == 0
    assert "fsdp" in capsys.readouterr().out
    assert main(["bench", "compare", before, after, "--fail-on-regression"]) == 1
    assert main(["bench", "compare", before, before, "--fail-on-regression"]) == 0


@pytest.mark.parametrize("form", ["table", "markdown", "csv"])
def test_every_format_names_what_changed(
    stored: tuple[str, str], form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "compare", *stored, "--format", form]) == 0
    assert "fsdp" in capsys.readouterr().out


def test_what_is_no_result_is_refused(
    tmp_path: Path, stored: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "compare", stored[0], str(tmp_path / "nowhere")]) == 2
    assert "cannot be read as a benchmark's result" in " ".join(capsys.readouterr().err.split())
