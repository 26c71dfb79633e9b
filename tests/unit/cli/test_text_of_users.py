"""What a user has named is printed as it is, whatever rich would make of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import unipar
from unipar.cli import main
from unipar.install import doctor
from unipar.strategy import Availability
from unipar.strategy.registry import StrategyInfo

ODD = ":bug:[red]x[/]y[/z]\\[bold]"


@pytest.mark.parametrize(
    "command",
    [
        ["checkpoints", "ls", f"/nowhere/{ODD}"],
        ["checkpoints", "verify", f"/nowhere/{ODD}/step-00000001"],
        ["runs", "show", ODD],
        ["bench", "compare", f"/nowhere/{ODD}", "/nowhere"],
        ["convert", f"/nowhere/{ODD}", "/nowhere/else"],
        ["train", f"/nowhere/{ODD}.yaml"],
        ["train", "--verbose", f"/nowhere/{ODD}.yaml"],
        ["doctor", "--self-test", "--strategy", ODD],
        ["install", ODD],
    ],
    ids=" ".join,
)
def test_an_error_shows_what_was_given(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 2
    assert ODD in capsys.readouterr().err


def test_verifying_shows_the_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = tmp_path / ":bug:[red]" / "step-00000001"
    damaged.mkdir(parents=True)
    assert main(["checkpoints", "verify", str(damaged)]) == 1
    assert f"damaged  {damaged}\n" in capsys.readouterr().out


def test_doctor_shows_reason_and_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = Availability(False, f"no {ODD}.", "pip install 'two[gpu]'")
    table = [StrategyInfo(":bug:", "two[gpu] 2.0", missing, None)]
    monkeypatch.setattr(doctor.registry, "table", lambda: table)
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert f":bug: cannot run here: no {ODD}.\n    to fix it: pip install 'two[gpu]'" in shown
    assert "two[gpu] 2.0" in shown


def test_there_is_one_way_to_a_console() -> None:
    package = Path(unipar.__file__).parent
    opened = [
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"\bConsole\(|from rich import (print|get_console)", path.read_text())
    ]
    assert opened == ["utils/console.py"]
