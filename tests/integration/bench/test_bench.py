"""``make bench`` runs, and tells a missed aim; the times themselves are no test's business."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from measure.report import BEGIN, END, Row, table, write_markdown  # noqa: E402
from measure.speed.timing import in_turns  # noqa: E402
from unipar.benchmark.statistics import Estimate  # noqa: E402


@pytest.mark.parametrize(
    "parts",
    [
        ["memory"],
        pytest.param(["overhead", "replicas", "checkpoints"], marks=pytest.mark.thorough),
    ],
    ids=" ".join,
)
def test_every_part_measures_what_it_names(parts: list[str], tmp_path: Path) -> None:
    # To import it takes seconds, and is not for this process to do.
    if find_spec("lightning_fabric") is None:
        pytest.skip("it measures beside Lightning Fabric, which is not installed")
    figures = tmp_path / "figures.json"
    command = [
        sys.executable,
        str(ROOT / "measure" / "speed" / "run.py"),
        "--quick",
        "--only",
        *parts,
    ]
    run = subprocess.Popen(
        [*command, "--json", str(figures)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, problem = run.communicate(timeout=170)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        raise
    assert run.returncode == 0, problem
    rows = json.loads(figures.read_text())["rows"]
    for row in rows:
        assert row["ratio"]["median"] > 0
        assert f"| {row['what']} |" in out
    # Exact whatever the machine, unlike times.
    held = [row["verdict"] for row in rows if row["what"].startswith("bytes of a rank")]
    assert held == (["met"] * 3 if "memory" in parts else [])


@pytest.mark.thorough
def test_a_face_is_measured_beside_its_framework(tmp_path: Path) -> None:
    figures = tmp_path / "faces.json"
    script = str(ROOT / "measure" / "speed" / "faces.py")
    subprocess.run(
        [sys.executable, script, "--quick", "--only", "ddp", "--json", str(figures)],
        check=True, timeout=170, capture_output=True,
    )  # fmt: skip
    rows = json.loads(figures.read_text())["faces"]["ddp"]["rows"]
    # Two programs on one process, and on two by either clock, beside two runs each.
    assert len(rows) == 12
    # A round is one measurement.
    assert all(row["ratio"]["pairs"] == 1 and row["ratio"]["median"] > 0 for row in rows)


def test_a_missed_aim_is_said_to_be_missed() -> None:
    slow = Row.timed("steps", [1.2, 1.3, 1.25], [1.0, 1.0, 1.0], "{:.2f} s".format, aim=1.1)
    unsure = Row.timed("loads", [1.2, 1.0, 1.15], [1.0, 1.0, 1.0], "{:.2f} s".format, aim=1.1)
    small = Row(
        "bytes", "1", "2", Estimate(median=0.5, low=0.5, high=0.5, pairs=1), aim=1.05, lowest=0.95
    )
    lines = table([slow, unsure, small]).splitlines()[2:]
    assert lines[0].endswith("| 1.250 (1.131 to 1.380) | 3 | at most 1.1 | **missed** |")
    assert lines[1].endswith("| at most 1.1 | **missed**, within the spread |")
    assert lines[2].endswith("| 0.500 | 1 | 0.95 to 1.05 | **missed** |")


def test_contenders_run_equally_often_in_changing_order() -> None:
    order: list[str] = []

    def contender(name: str) -> float:
        order.append(name)
        return 1.0

    in_turns({name: lambda name=name: contender(name) for name in "abc"}, turns=20)
    turns = ["".join(order[start : start + 3]) for start in range(0, 60, 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert len(set(turns)) > 3


def test_figures_replace_those_of_the_run_before(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_markdown(page, "new")
    assert page.read_text() == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    page.write_text("no place\n")
    with pytest.raises(ValueError, match=re.escape(f"add {BEGIN} and {END}")):
        write_markdown(page, "new")
