"""``unipar migrate``: what it writes, what it says, and its exit codes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from unipar.cli import main
from unipar.migrate.verify import Proof, Run
from unipar.migrate.writing import read, runnable

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
FACED = "import unipar.compat.torch as torch"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def commit(script: Path) -> None:
    """Put a script into a git repository of its directory."""
    git = ["git", "-C", str(script.parent), "-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True, timeout=60)


def test_the_result_goes_beside_the_original(script: Path) -> None:
    assert main(["migrate", str(script)]) == 0
    assert script.read_text() == SCRIPT
    written = script.with_name("train_unipar.py").read_text()
    assert written == SCRIPT.replace("import torch", FACED)
    config = script.with_name("unipar.yaml").read_text()
    assert "# strategy: ddp" in config
    assert "{}" not in config


def test_what_is_there_is_not_written_over(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.with_name("unipar.yaml").write_text("strategy: fsdp\n")
    assert main(["migrate", str(script)]) == 2
    assert "is there already. Pass --force" in capsys.readouterr().err
    assert not script.with_name("train_unipar.py").exists()
    assert main(["migrate", str(script), "--force"]) == 0
    assert "fsdp" not in script.with_name("unipar.yaml").read_text()


def test_check_and_diff_write_nothing(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", str(script), "--check"]) == 1
    assert capsys.readouterr().out == "would change train.py\n"
    assert main(["migrate", str(script), "--diff"]) == 0
    assert "\n-import torch\n" in capsys.readouterr().out
    assert [path.name for path in script.parent.iterdir()] == ["train.py"]


def test_in_place_wants_a_clean_tree_and_keeps_the_original(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["migrate", str(script), "--in-place"]) == 2
    assert "is in no git repository" in capsys.readouterr().err
    commit(script)
    script.write_text(SCRIPT + "# more\n")
    assert main(["migrate", str(script), "--in-place"]) == 2
    assert "changes that are not committed" in capsys.readouterr().err
    script.write_text(SCRIPT)
    assert main(["migrate", str(script), "--in-place"]) == 0
    assert script.with_name("train.py.orig").read_text() == SCRIPT
    assert FACED in script.read_text()
    assert main(["migrate", str(script), "--check"]) == 0
    assert "Nothing is to be migrated." in capsys.readouterr().out


def test_a_refused_script_is_left_alone_and_reported(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text(f"from horovod.torch import Adasum\n{SCRIPT}")
    report = script.with_name("report.md")
    assert main(["migrate", str(script), "--report", str(report)]) == 2
    assert "train.py:1: refused: Adasum: the face has no Adasum. " in capsys.readouterr().out
    assert "| train.py:1 | `Adasum` |" in report.read_text()
    assert sorted(path.name for path in script.parent.iterdir()) == ["report.md", "train.py"]


def test_a_directory_is_migrated_together(tmp_path: Path) -> None:
    root = tmp_path / "program"
    root.mkdir()
    head, tail = SCRIPT.split("for step", 1)
    (root / "parts.py").write_text(head)
    (root / "run.py").write_text(f"import torch\nfrom parts import model, opt\nfor step{tail}")
    assert main(["migrate", str(root)]) == 0
    written = tmp_path / "program_unipar"
    assert FACED in (written / "parts.py").read_text()
    assert FACED in (written / "run.py").read_text()


def test_settings_stand_beside_each_script_that_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "program"
    for name, text in {
        "src/train.py": "from model import model, opt\n" + SCRIPT.partition("0.1)\n")[2],
        "src/model.py": "".join(SCRIPT.partition("0.1)\n")[:2]),
        "tools/tune.py": "from src.model import model\nmodel.backward()\n",
        "tools/show.py": "print()\n", "src/__init__.py": "",
    }.items():  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    assert main(["migrate", str(root)]) == 0
    written = tmp_path / "program_unipar"
    found = {str(one.relative_to(written)) for one in written.rglob("unipar.yaml")}
    assert found == {"src/unipar.yaml", "tools/unipar.yaml"}
    commit(root / "src")
    assert main(["migrate", str(root), "--in-place", "--force", "--script", "tools/show.py"]) == 0
    found = {str(one.relative_to(root)) for one in root.rglob("unipar.yaml")}
    assert found == {"src/unipar.yaml", "tools/unipar.yaml"}


def test_files_that_are_not_migrated_with_a_script_are_told_of(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text(f"import helpers\n{SCRIPT}")
    script.with_name("helpers.py").write_text("import nets, os\n")
    script.with_name("nets.py").write_text("import torch\n")
    assert main(["migrate", str(script)]) == 0
    assert (
        "train.py:1: changed: import helpers: nets.py imports the framework too, and is not "
        in (capsys.readouterr().out)
    )
    # Nor are they migrated because what was written beside imports them.
    assert main(["migrate", str(script.parent), "--diff"]) == 0
    assert f"+++ b/nets.py\n@@ -1 +1 @@\n-import torch\n+{FACED}" in capsys.readouterr().out


@pytest.mark.parametrize("output", ["program_unipar", "program/out"])
def test_a_copy_of_a_directory_has_what_the_program_reads(
    output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unipar.migrate.folders.LARGEST", 2000)
    root = tmp_path / "program"
    for name, text in {
        "train.py": SCRIPT, "config.yaml": "lr: 0.1", "run.sh": "python train.py",
        "lib/__init__.py": "", "lib/table.csv": "1", "data/deep/a.txt": "a", "data/.hidden": "",
        "large.bin": "x" * 2001, "many/a": "x" * 1001, "many/b": "x" * 1001, "runs/1/log": "",
        "checkpoints/last.pt": "", "checkpointing/__init__.py": "", "venv/pyvenv.cfg": "",
        "venv/lib/torch.py": "import torch", ".env": "", ".git/config": "", "unipar.yaml": "x",
        "lib/__pycache__/a.pyc": "",
    }.items():  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "run.sh").chmod(0o755)
    (root / "linked").symlink_to(root / "data")
    written = tmp_path / output
    assert main(["migrate", str(root), "--output", str(written)]) == 0
    found = {str(one.relative_to(written)) for one in written.rglob("*") if one.is_file()}
    assert found == {"train.py", "lib/__init__.py", "checkpointing/__init__.py", "unipar.yaml",
                     "config.yaml", "run.sh", "data/deep/a.txt", "data/.hidden",
                     "lib/table.csv"}  # fmt: skip
    assert (written / "run.sh").stat().st_mode & 0o100
    said = capsys.readouterr().out.splitlines()
    assert "copied config.yaml, data, run.sh, lib/table.csv" in said
    assert [one for one in said if one.startswith("left out")] == [
        "left out .env: it is hidden",
        "left out checkpoints: by its name it holds what earlier runs wrote",
        "left out large.bin: it has 0.0 MiB, more than the 0 that are copied",
        "left out linked: it is a link to a folder",
        "left out many: it has 0.0 MiB, more than the 0 that are copied",
        "left out runs: by its name it holds what earlier runs wrote",
        "left out venv: it is a virtual environment",
    ]


def test_what_a_copy_has_already_is_not_written_over(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.with_name("config.yaml").write_text("lr: 0.1")
    assert main(["migrate", str(script.parent)]) == 0
    assert main(["migrate", str(script.parent)]) == 0
    copy = script.parent.with_name(f"{script.parent.name}_unipar") / "config.yaml"
    copy.write_text("lr: 0.2")
    assert main(["migrate", str(script.parent)]) == 2
    assert "config.yaml is there already. Pass --force" in capsys.readouterr().err
    assert copy.read_text() == "lr: 0.2"


def test_a_syntax_error_is_reported(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text("import torch\nif:\n")
    assert main(["migrate", str(script)]) == 2
    assert "train.py:2: syntax error: " in capsys.readouterr().err


def run(losses: list[float]) -> Run:
    """A run of one process whose optimizer has stepped once."""
    return Run({0: losses}, "cpu", ("float32",), False, {}, steps=1, moved=0.1)


def proof(*losses: float) -> Callable[..., Proof]:
    """A comparison of an original whose losses are 1.0 and 0.5 with a migrated script."""
    return lambda *_args, **_kwargs: Proof({0: [1.0, 0.5]}, {0: losses})


@pytest.mark.parametrize("options", [[], ["--in-place"], ["--output", "out"]])
def test_nothing_is_written_where_the_runs_differ(
    options: list[str], script: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    commit(script)
    monkeypatch.chdir(script.parent)
    monkeypatch.setattr("unipar.migrate.verify.verify", proof(1.0, 0.6))
    before = sorted(script.parent.iterdir())
    assert main(["migrate", str(script), "--verify", *options]) == 1
    said = capsys.readouterr().out
    assert "the runs DIFFER\nNothing was written. --diff shows the changes, and --force" in said
    assert sorted(script.parent.iterdir()) == before
    assert script.read_text() == SCRIPT
    assert main(["migrate", str(script), "--verify", "--force", *options]) == 1
    assert capsys.readouterr().out.count("\nwrote ") == 2
    assert sorted(script.parent.iterdir()) != before


def test_a_notebook_whose_runs_differ_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = {"cell_type": "code", "source": SCRIPT.splitlines(keepends=True)}
    (tmp_path / "train.ipynb").write_text(json.dumps({"cells": [cell]}))
    monkeypatch.setattr("unipar.migrate.verify.verify", proof(1.0, 0.6))
    assert main(["migrate", str(tmp_path / "train.ipynb"), "--verify"]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["train.ipynb"]
    monkeypatch.setattr("unipar.migrate.verify.verify", proof(1.0, 0.5))
    assert main(["migrate", str(tmp_path / "train.ipynb"), "--verify"]) == 0
    assert (tmp_path / "train_unipar.ipynb").exists()


def test_an_interrupted_proof_writes_nothing(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_args: object, **_kwargs: object) -> Proof:
        raise KeyboardInterrupt

    monkeypatch.setattr("unipar.migrate.verify.verify", interrupted)
    assert main(["migrate", str(script), "--verify", "--force"]) == 130
    assert [path.name for path in script.parent.iterdir()] == ["train.py"]


def test_no_steps_are_not_the_number_that_is_taken_without_any(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def run_of(*_: object, steps: int, **__: object) -> Run:
        seen.append(steps)
        return run([1.0])

    monkeypatch.setattr("unipar.migrate.verify.run_of", run_of)
    assert main(["migrate", str(script), "--verify", "--steps", "0", "--diff"]) == 0
    assert set(seen) == {0}


@pytest.mark.parametrize("losses", [[0.0, 0.0], [float("nan"), 0.0], []])
def test_losses_of_zero_show_nothing(
    losses: list[float], script: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("unipar.migrate.verify.run_of", lambda *_args, **_kwargs: run(losses))
    assert main(["migrate", str(script), "--verify"]) == 2
    said = capsys.readouterr()
    assert "is zero or no finite number, so there is nothing to compare. Let the script" in said.err
    assert "agree" not in said.out
    assert [path.name for path in script.parent.iterdir()] == ["train.py"]


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (OSError("full"), 2)])
@pytest.mark.parametrize("at", range(3))
def test_writing_that_ends_early_leaves_all_as_it_was(
    at: int, error: BaseException, code: int, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(script)
    before = {path: path.read_bytes() for path in script.parent.iterdir() if path.is_file()}
    replace, left = Path.replace, iter(range(at))

    def ends(self: Path, target: Path) -> Path:
        if next(left, None) is None:
            raise error
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", ends)
    assert main(["migrate", str(script), "--in-place"]) == code
    after = {path: path.read_bytes() for path in script.parent.iterdir() if path.is_file()}
    assert after == before


def test_an_output_over_the_original_is_refused(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["migrate", str(script), "--output", str(script.parent), "--force"]) == 2
    assert "train.py is what is migrated. Give another --output" in capsys.readouterr().err
    assert script.read_text() == SCRIPT


def test_an_original_kept_before_is_not_written_over(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit(script)
    kept = script.with_name("train.py.orig")
    kept.write_text("the first one")
    assert main(["migrate", str(script), "--in-place"]) == 2
    assert "train.py.orig is there already" in capsys.readouterr().err
    assert kept.read_text() == "the first one"
    assert script.read_text() == SCRIPT


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"train.py": "import parts", "parts.py": "", "test_train.py": "import train"},
         ["train.py"]),
        # Nobody can see what this imports.
        ({"main.py": "import importlib", "train.py": "import parts", "parts.py": ""},
         ["main.py", "train.py"]),
    ],
)  # fmt: skip
def test_what_no_other_file_imports_is_run(
    files: dict[str, str], found: list[str], tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert runnable(read([tmp_path])) == found
