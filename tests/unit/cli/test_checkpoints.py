"""``unipar checkpoints``: what is listed, what is found damaged, and what is never removed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from unipar.checkpoint import save
from unipar.cli import main
from unipar.state import Box, EngineState, LocalState
from unipar.train import lock
from unipar.world import Placement, World

SHARD = "m/weights/rank-00000.safetensors"
CONFIG = "checkpoint: {keep_last: 2, keep_best: {metric: loss, mode: min}}\n"


class Engine:
    optimizer = lr_scheduler = None

    def export_state(self) -> EngineState:
        tensor = torch.ones(300, 1000)
        return EngineState([LocalState("w", (300, 1000), tensor.dtype, (WHOLE,), (tensor,))])


WHOLE = Box((0, 0), (300, 1000))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The output directory of a run with five checkpoints, of which it keeps the best, and two."""
    engine: Any = Engine()
    for step, loss in enumerate((2.5, 1.25, 1.5, float("nan"), 1.75), 1):
        save(
            tmp_path / "checkpoints",
            {"m": engine},
            World(Placement()),
            step=step,
            metrics={"loss": loss},
            strategy="single",
        )
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


def step(run: Path, number: int) -> Path:
    return run / "checkpoints" / f"step-{number:08d}"


def left(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 0x10
    file.write_bytes(data)


def listed(directory: Path, capsys: pytest.CaptureFixture[str]) -> dict[int, dict[str, Any]]:
    assert main(["checkpoints", "ls", str(directory), "--json"]) == 0
    return {one["step"]: one for one in json.loads(capsys.readouterr().out)}


@pytest.mark.parametrize("below", ["", "checkpoints"])
def test_what_there_is_and_what_the_run_keeps(
    run: Path, below: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = listed(run / below, capsys)
    assert list(found) == [1, 2, 3, 4, 5]
    assert {number: one["kept_as"] for number, one in found.items()} == {
        1: None, 2: "best loss", 3: None, 4: "last", 5: "last",
    }  # fmt: skip
    assert all(one["whole"] for one in found.values())
    assert found[5]["metrics"] == {"loss": 1.75}
    assert found[4]["metrics"] == {"loss": None}
    files = [file for file in step(run, 5).rglob("*") if file.is_file()]
    assert found[5]["num_files"] == len(files) - 1
    sizes = sum(file.stat().st_size for file in files if file.name != "manifest.json")
    assert found[5]["num_bytes"] == sizes


def test_damage_and_what_is_not_finished_is_said(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    (step(run, 2) / SHARD).unlink()
    with open(step(run, 5) / SHARD, "ab") as file:
        file.write(b"\0")
    flip(step(run, 4) / "manifest.json", 50)
    (step(run, 3) / "manifest.json").unlink()
    (run / "checkpoints" / ".tmp-step-00000006").mkdir()
    (run / "config.yaml").unlink()
    found = listed(run, capsys)
    assert [number for number, one in found.items() if one["whole"]] == [1]
    assert main(["checkpoints", "ls", str(run)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 110
    assert f"step-00000002: {SHARD}: No such file or directory" in out
    assert "step-00000003: manifest.json: No such file or directory" in out
    assert "step-00000004: manifest.json is damaged" in out
    assert f"step-00000005: {SHARD} has 1200" in out
    assert ".tmp-step-00000006: being written, or left by a save that was cut off" in out


@pytest.mark.parametrize(
    "text", [b"", b"[]", b'{"checksum":"0"}', b'{"checksum":"x', b"\xff" * 100, None]
)
def test_any_manifest_is_listed(
    run: Path, text: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = step(run, 5) / "manifest.json"
    manifest.unlink()
    if text is None:
        os.mkfifo(manifest)
    else:
        manifest.write_bytes(text)
    assert "manifest.json is damaged" in listed(run, capsys)[5]["problem"]


def test_listing_imports_no_torch(run: Path, new_interpreters: None) -> None:
    code = (
        "import sys; from unipar.cli import main; main(['checkpoints', 'ls', sys.argv[1]]); "
        "assert 'torch' not in sys.modules"
    )
    told = subprocess.run([sys.executable, "-c", code, str(run)], check=True, capture_output=True)
    assert b"best loss" in told.stdout


def test_whole_ones_are_verified(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "verify", str(run)]) == 0
    assert capsys.readouterr().out.count("whole") == 5
    assert main(["checkpoints", "verify", "--quick", str(step(run, 1))]) == 0
    assert "headers and sizes are right" in capsys.readouterr().out


def test_a_damaged_file_is_named_and_the_exit_code_is_1(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(step(run, 2) / SHARD, 700_000)
    assert main(["checkpoints", "verify", str(run)]) == 1
    out = capsys.readouterr().out
    assert f"step-00000002/{SHARD} is damaged: the checksum of tensor 'w' differs" in out
    assert out.count("whole") == 4
    assert main(["checkpoints", "verify", str(step(run, 2)), "--quick"]) == 0
    flip(step(run, 2) / SHARD, 40)
    assert main(["checkpoints", "verify", str(step(run, 2)), "--quick"]) == 1
    assert "the checksum of its header differs" in capsys.readouterr().out


def test_all_but_some_are_removed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (step(run, 1) / SHARD).unlink()
    arguments = ["checkpoints", "rm", str(run), "--keep-last", "1", "--keep-best", "loss"]
    assert main(arguments) == 2
    assert "Give --yes" in capsys.readouterr().err
    assert left(run) == [1, 2, 3, 4, 5]
    assert main([*arguments, "--yes"]) == 0
    # The first is not whole, and nobody has named it.
    assert left(run) == [1, 2, 5]
    assert not (run / "checkpoints" / lock.NAME).exists()
    assert main([*arguments, "--yes"]) == 0
    assert "nothing to remove" in capsys.readouterr().out
    assert main(["checkpoints", "rm", str(step(run, 1)), "--yes"]) == 0
    assert left(run) == [2, 5]


def test_the_newest_whole_one_stays(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (step(run, 5) / SHARD).unlink()
    named = [str(step(run, 5)), str(step(run, 4))]
    assert main(["checkpoints", "rm", *named, "--yes"]) == 2
    assert "step-00000004 is the newest whole checkpoint" in capsys.readouterr().err
    assert left(run) == [1, 2, 3, 4, 5]
    assert main(["checkpoints", "rm", *named, "--yes", "--force"]) == 0
    assert left(run) == [1, 2, 3]


def test_one_that_is_named_after_another_step_is_not_the_newest(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(step(run, 5), step(run, 50))
    assert listed(run, capsys)[50]["problem"] == (
        "step is 5, and the directory is named step-00000050"
    )
    assert main(["checkpoints", "rm", str(run), "--keep-last", "1", "--yes"]) == 0
    assert left(run) == [5, 50]


def test_what_stays_is_verified_before_others_are_removed(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(step(run, 5) / SHARD, 700_000)
    arguments = ["checkpoints", "rm", str(run), "--keep-last", "1", "--yes"]
    assert main(arguments) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "step-00000005 is the newest that would stay, and it is damaged:" in said
    assert "Remove that one first, by its path and --force; nothing was removed." in said
    assert left(run) == [1, 2, 3, 4, 5]
    assert main(["checkpoints", "rm", str(step(run, 5)), "--force", "--yes"]) == 0
    assert main(arguments) == 0
    assert left(run) == [4]


def test_links_are_not_followed_to_what_they_lead_to(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dangling, link = run / "checkpoints/step-00000009", run / "checkpoints/step-00000008"
    dangling.symlink_to("gone")
    link.symlink_to("step-00000001")
    for command in ("rm", "ls", "verify"):
        assert main(["checkpoints", command, str(dangling)]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert f"{dangling} is a link to gone, and there is nothing" in said
    assert main(["checkpoints", "rm", str(link), "--yes"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"{link} is a link to {step(run, 1)}. Name what is to be removed by its own path" in said
    assert left(run) == [1, 2, 3, 4, 5, 8, 9]


def test_nothing_is_removed_while_a_run_has_the_directory(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "checkpoints" / lock.NAME
    path.write_text(json.dumps({"host": "elsewhere", "pid": 1, "machine": "other"}))
    assert main(["checkpoints", "rm", str(step(run, 1)), "--yes"]) == 2
    assert "is in use by a run of ? on elsewhere" in " ".join(capsys.readouterr().err.split())
    assert left(run) == [1, 2, 3, 4, 5]
    os.utime(path, (time.time() - 400, time.time() - 400))
    assert main(["checkpoints", "rm", str(step(run, 1)), "--yes"]) == 0
    assert left(run) == [2, 3, 4, 5]


@pytest.mark.parametrize(("answer", "stay"), [("y", [2, 3, 4, 5]), ("", [1, 2, 3, 4, 5])])
def test_it_asks(
    run: Path,
    answer: str,
    stay: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or answer)
    main(["checkpoints", "rm", str(step(run, 1))])
    assert "Remove 1 checkpoint, 1.2 MB?" in asked[0]
    assert left(run) == stay


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ls", "{run}/nowhere"], "cannot be read: No such file"),
        (["ls", "s3://bucket/run"], "is a URL, and this looks at directories"),
        (["verify", "{run}/checkpoints/step-00000009"], "there is no checkpoint"),
        (["rm", "{run}", "--yes"], "is no checkpoint .* say how many stay: --keep-last 2"),
        (["rm", "{run}", "--keep-last", "0", "--yes"], "--keep-last 0 would keep no checkpoint"),
        (["rm", "{run}", "--keep-best", "loss:best"], "write it like loss, or accuracy:max"),
        (["rm", "{run}", "--keep-best", "score"], "no checkpoint in .* has the metric 'score'"),
        (["rm", "{run}/checkpoints/step-00000001", "--keep-last", "1"], "is one checkpoint"),
    ],
)
def test_what_cannot_be_is_explained(
    run: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoints", *(text.format(run=run) for text in arguments)]) == 2
    assert re.search(said, " ".join(capsys.readouterr().err.split()))
    assert left(run) == [1, 2, 3, 4, 5]
