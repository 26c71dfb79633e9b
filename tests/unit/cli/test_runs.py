"""``unipar runs``: the state of each run by its files, whatever is in them."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from unipar.cli import main
from unipar.train import lock
from unipar.train.watching.chart import curve


def started(step: int = 0, ranks: int = 2, **more: Any) -> dict[str, Any]:
    row = {"format": 1, "event": "started", "time": 1e9, "step": step, "strategy": "ddp"}
    return row | {"world_size": ranks, "hosts": ["a"], "total_steps": 40, **more}


def ended(how: str, **more: Any) -> dict[str, Any]:
    return {"format": 1, "event": "ended", "time": 1e9, "step": 20, "how": how, **more}


def make(directory: Path, *events: dict[str, Any], steps: int = 20) -> Path:
    directory.mkdir(parents=True)
    rows = ({"step": s, "loss": 4 / s, "items_per_second": 10.0 * s} for s in range(1, steps + 1))
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    if events:
        text = "".join(f"{json.dumps(row)}\n" for row in events)
        (directory / "events.jsonl").write_text(text)
    return directory


def claim(directory: Path, age: float = 0.0, **changes: Any) -> None:
    path = directory / lock.NAME
    path.write_text(json.dumps({"host": "elsewhere", "pid": 1, "machine": "other", **changes}))
    os.utime(path, (time.time() - age, time.time() - age))


def listed(directory: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    assert main(["runs", "--directory", str(directory), "--json"]) == 0
    return {run["name"]: run for run in json.loads(capsys.readouterr().out)}


def test_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    make(tmp_path / "finished", started(), ended("finished"))
    make(tmp_path / "failed", started(), ended("failed", error="ValueError: [it] broke"))
    make(tmp_path / "interrupted", started(), ended("interrupted", signal="SIGTERM"))
    claim(make(tmp_path / "running", started()), age=100)
    claim(make(tmp_path / "resumed", started(), ended("finished"), started(20)))
    claim(make(tmp_path / "lost", started()), age=400)
    own = lock._self() | {"pid": 2**22 - 1, "started": 0}
    claim(make(tmp_path / "killed here", started()), **own)
    make(tmp_path / "silent", started())
    make(tmp_path / "older")
    (tmp_path / "no run").mkdir()
    (tmp_path / "a file").touch()
    found = listed(tmp_path, capsys)
    assert {name: run["state"] for name, run in found.items()} == {
        "finished": "finished",
        "failed": "failed",
        "interrupted": "interrupted",
        "running": "running",
        "resumed": "running",
        "lost": "lost",
        "killed here": "lost",
        "silent": "unknown",
        "older": "unknown",
    }
    assert found["failed"]["why"] == "ValueError: [it] broke"
    one = found["resumed"]
    assert (one["strategy"], one["ranks"], one["step"], one["total_steps"]) == ("ddp", 2, 20, 40)
    assert (one["loss"], one["items_per_second"], one["starts"]) == (0.2, 200.0, 2)
    assert not any(run["problems"] for run in found.values())


def test_clocks_of_machines_need_not_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    claim(make(tmp_path / "running", started()), age=100)
    claim(make(tmp_path / "lost", started()), age=400)
    now = time.time
    for apart in (3600, -3600):
        monkeypatch.setattr(time, "time", lambda apart=apart: now() + apart)
        found = listed(tmp_path, capsys)
        assert {name: run["state"] for name, run in found.items()} == {
            "running": "running",
            "lost": "lost",
        }
        assert max(run["idle"] for run in found.values()) < 60


def test_an_older_run_is_known_by_its_config_and_not_guessed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    make(tmp_path / "older")
    (tmp_path / "older" / "config.yaml").write_text("strategy: {name: fsdp}\nsteps: 30\n")
    run = listed(tmp_path, capsys)["older"]
    assert (run["strategy"], run["total_steps"], run["step"]) == ("fsdp", 30, 20)
    assert (run["ranks"], run["starts"], run["state"]) == (None, None, "unknown")
    assert main(["runs", "show", "older", "--directory", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "fsdp; ranks, hosts and launcher are unknown" in out


def test_the_newest_is_first_in_plain_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for age, name in ((50, "older"), (5, "newest"), (500, "oldest")):
        directory = make(tmp_path / name, started(), ended("failed", error="E: [no] \x1b[31mred"))
        for file in directory.iterdir():
            os.utime(file, (time.time() - age, time.time() - age))
    assert main(["runs", "--directory", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    places = [out.index(name) for name in ("newest", "older", "oldest")]
    assert places == sorted(places)
    assert "\x1b" not in out
    assert "oldest: E: [no]  [31mred" in out


@pytest.mark.timeout(150)
@pytest.mark.parametrize("file", ["metrics.jsonl", "events.jsonl", "config.yaml", lock.NAME])
@pytest.mark.parametrize("kind", ["cut", "binary", "pipe", "directory", "deep", "numbers", "long"])
def test_hostile_files_are_a_line_and_leave_other_runs_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, kind: str
):
    make(tmp_path / "good", started(), ended("finished"))
    path = make(tmp_path / "bad", started()) / file
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        odd = '{"format": 1, "event": "ended", "how": ["x"], "step": NaN, "loss": 1e999}\n'
        path.write_bytes(
            {
                "cut": b'{"step": 21, "lo',
                "binary": bytes(range(256)) * 400,
                "deep": b"[" * 5_000 + b"\n",
                "numbers": odd.encode() + b'{"step": 1e400, "loss": {}, "format": 1}\n',
                "long": b'{"step": 21, "x": "' + b"x" * 2_000_000 + b'"}\n',
            }[kind]
        )
    found = listed(tmp_path, capsys)
    assert found["good"]["state"] == "finished"
    assert not found["good"]["problems"]
    assert found["bad"]["state"] != "finished"
    if file != lock.NAME and kind in ("pipe", "directory", "binary"):
        (problem,) = found["bad"]["problems"]
        assert file in problem
    for command in (["runs"], ["runs", "show", "bad"]):
        assert main([*command, "--directory", str(tmp_path)]) == 0
    capsys.readouterr()


def test_a_directory_that_may_not_be_read_is_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    make(tmp_path / "good", started(), ended("finished"))
    closed = make(tmp_path / "closed")
    there = os.listdir

    def refuse(path: Any) -> list[str]:
        if Path(path) == closed:
            raise PermissionError(13, "Permission denied")
        return there(path)

    # The user of a container may read whatever its mode says.
    monkeypatch.setattr(os, "listdir", refuse)
    found = listed(tmp_path, capsys)
    assert found["closed"]["problems"] == ["the directory cannot be read: Permission denied"]
    assert found["good"]["state"] == "finished"


def test_a_loss_that_is_not_finite_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = make(tmp_path / "nan", started()) / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 21, "loss": null}\n')
    run = listed(tmp_path, capsys)["nan"]
    assert (run["step"], run["loss"]) == (21, None)
    assert run["problems"] == ["the last loss that was logged is not finite"]


def test_the_page_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    again = started(10, 4, launcher="mpi", device="cpu", restart=1)
    slow = {"format": 1, "event": "slow", "time": 1e9, "step": 12, "rank": 3, "host": "b"}
    path = str(tmp_path / "one" / "checkpoints" / "step-00000010")
    saved = {"format": 1, "event": "saved", "time": 1e9, "step": 10, "path": path}
    first = started(device="cpu", launcher="local")
    make(tmp_path / "one", first, saved, again, slow, ended("finished"))
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["runs", "show", "one", "--directory", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "at step 0: ddp on 2 x cpu on a, launcher local" in " ".join(out.split())
    assert "at step 10: ddp on 4 x cpu on a, launcher mpi, restart 1" in " ".join(out.split())
    assert "rank 3 on b, since" in out
    assert " checkpoints/step-00000010" in out
    for name in ("loss", "items/s", "ranks"):
        assert any(line.strip() == name for line in out.splitlines())
    # Resumed at step 10 of 0 to 20: in the middle of the 69 columns.
    (marks,) = [line for line in out.splitlines() if line.strip() == "^"]
    assert marks.index("^") - 10 == 34
    assert main(["runs", "show", str(tmp_path / "one")]) == 0


def test_what_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    make(tmp_path / "nearly")
    assert main(["runs", "show", "nearby", "--directory", str(tmp_path)]) == 2
    assert "Did you mean 'nearly'?" in " ".join(capsys.readouterr().err.split())
    assert main(["runs", "--directory", str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main(["runs", "show", "nearly", "--directory", str(tmp_path), "--follow"]) == 2
    assert "Leave it out" in capsys.readouterr().err


def test_a_curve_goes_through_its_points():
    points = [(0.0, 0.0), (1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]
    assert curve(points, 4, 4, (0.0, 3.0), True) == ["   *", "  * ", " *  ", "*   "]
    assert curve(points, 2, 1, (0.0, 3.0), False) == ["⡠⠊"]
    # All of a column's values are seen, and a flat curve is a line.
    assert curve([(0.0, 0.0), (0.0, 3.0), (9.0, 0.0)], 2, 4, (0.0, 9.0), True)[1][0] == "*"
    assert curve([(0.0, 5.0), (3.0, 5.0)], 4, 2, (0.0, 3.0), True)[1] == "****"


@pytest.mark.parametrize("color", [False, True])
@pytest.mark.parametrize("width", [120, 80, 60, 40, 24])
def test_names_and_words_are_whole_at_any_width(
    width: int,
    color: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    long = "a-run_of.long-name"
    first = started(strategy="fsdp:sharding=hybrid,cpu_offload=true", total_steps=30)
    make(tmp_path / "run10", first, ended("interrupted", signal="SIGINT"), steps=2000)
    make(tmp_path / long, started(strategy="mesh:tp=2,pp=2"), ended("finished"))
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("FORCE_COLOR" if color else "NO_COLOR", "1")
    assert main(["runs", "--directory", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert ("\x1b[" in out) == color
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in out.splitlines()]
    assert max(map(len, lines)) <= width
    table = lines[: next((i for i, line in enumerate(lines) if line[:5] == "There"), None)]
    words = {word for line in table for word in line.split() if "─" not in word}
    assert {"run", "run10", long} <= words
    # Wherever a cell was broken, it was between these.
    assert words <= {
        *("run", "state", "strategy", "ranks", "step", "loss", "items/s", "last", "change"),
        *("run10", "interrupted", "(SIGINT)", "2000/30", "0.0020", "20.0k"),
        *(long, "finished", "20/40", "0.2000", "200", "2", "ago"),
        *("fsdp:", "sharding=hybrid,", "cpu_offload=true"),
        *("fsdp:sharding=hybrid,", "fsdp:sharding=hybrid,cpu_offload=true", "mesh:tp=2,pp=2"),
        *(word for word in words if re.fullmatch(r"\d+:\d\d", word)),
    }
    left_out = " ".join(lines[len(table) :])
    for column in ("state", "step", "strategy"):
        assert (column in words) != (column in left_out)
    if width >= 40:
        assert {"interrupted", "finished"} <= words


def test_a_pipe_gets_every_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("COLUMNS", raising=False)
    strategy = "fsdp:sharding=hybrid,cpu_offload=true"
    name = "a-name-" * 12
    make(tmp_path / name, started(strategy=strategy), ended("interrupted", signal="SIGINT"))
    assert main(["runs", "--directory", str(tmp_path)]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if name in line]
    assert row.split()[1:6] == ["interrupted", "(SIGINT)", strategy, "2", "20/40"]
