"""``unipar migrate``: what it writes, what it says, and its exit codes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from unipar.cli import main

SCRIPT = """\
import torch
model = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    opt.zero_grad()
    loss = model(torch.randn(4, 2)).square().mean()
    loss.backward()
    opt.step()
"""
CONFIG = "strategy: auto\ndevice: cpu\n"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_the_result_goes_beside_the_original(script: Path) -> None:
    assert main(["migrate", str(script)]) == 0
    assert script.read_text() == SCRIPT
    assert "script.backward(loss, opt)" in script.with_name("train_unipar.py").read_text()
    assert script.with_name("unipar.yaml").read_text().endswith(CONFIG)


def test_what_is_there_is_not_written_over(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.with_name("unipar.yaml").write_text("strategy: fsdp\n")
    assert main(["migrate", str(script)]) == 2
    assert "is there already. Pass --force" in capsys.readouterr().err
    assert not script.with_name("train_unipar.py").exists()
    assert main(["migrate", str(script), "--force"]) == 0
    assert script.with_name("unipar.yaml").read_text().endswith(CONFIG)


def test_check_and_diff_write_nothing(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", str(script), "--check"]) == 1
    assert main(["migrate", str(script), "--diff"]) == 0
    assert "\n-    loss.backward()\n" in capsys.readouterr().out
    assert [path.name for path in script.parent.iterdir()] == ["train.py"]


def test_in_place_wants_a_clean_tree_and_keeps_the_original(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["migrate", str(script), "--in-place"]) == 2
    assert "is in no git repository" in capsys.readouterr().err
    git = ["git", "-C", str(script.parent), "-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True, timeout=60)
    script.write_text(SCRIPT + "# more\n")
    assert main(["migrate", str(script), "--in-place"]) == 2
    assert "changes that are not committed" in capsys.readouterr().err
    script.write_text(SCRIPT)
    assert main(["migrate", str(script), "--in-place"]) == 0
    assert script.with_name("train.py.orig").read_text() == SCRIPT
    assert "script.engine(opt).step()" in script.read_text()
    assert main(["migrate", str(script), "--check"]) == 0
    assert "Nothing is to be migrated." in capsys.readouterr().out


def test_a_refused_script_is_left_alone_and_reported(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text(SCRIPT.replace("backward()", "backward(retain_graph=True)"))
    report = script.with_name("report.md")
    assert main(["migrate", str(script), "--report", str(report)]) == 2
    assert "train.py:7: refused: loss.backward(retain_graph=True): " in capsys.readouterr().out
    assert "| train.py:7 | `loss.backward(retain_graph=True)` |" in report.read_text()
    assert sorted(path.name for path in script.parent.iterdir()) == ["report.md", "train.py"]


def test_a_directory_is_migrated_together(tmp_path: Path) -> None:
    root = tmp_path / "program"
    root.mkdir()
    head, tail = SCRIPT.split("for step", 1)
    (root / "parts.py").write_text(head)
    (root / "run.py").write_text(f"import torch\nfrom parts import model, opt\nfor step{tail}")
    assert main(["migrate", str(root)]) == 0
    written = tmp_path / "program_unipar"
    assert "script.prepare(model" in (written / "parts.py").read_text()
    assert "script.engine(model)(torch.randn(4, 2))" in (written / "run.py").read_text()
    assert (written / "unipar.yaml").read_text().endswith(CONFIG)


def test_a_syntax_error_is_reported(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text("import torch\nif:\n")
    assert main(["migrate", str(script)]) == 2
    assert "train.py:2: syntax error: " in capsys.readouterr().err
