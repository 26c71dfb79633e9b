"""``unipar migrate --verify``: two runs that agree, and two that do not."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from unipar.cli import main
from unipar.errors import ConfigError
from unipar.migrate.verify import losses_of, run_of, verify

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


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_verify_runs_both_and_says_whether_they_agree(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["migrate", str(script), "--verify", "--steps", "5", "--processes", "2"]) == 0
    said = capsys.readouterr().out
    assert "The migrated script ran on 2 processes, the original on one." in said
    # How two halves of a batch are summed depends on the processor.
    agree = r"largest relative difference (\S+) \(up to 1e-05 is rounding\): the runs agree\n"
    found = re.search(agree, said)
    assert found is not None
    assert float(found[1]) < 1e-6
    assert said.count("\n   0 ") == 5


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_verify_tells_runs_apart(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # It learns at another rate where unipar is imported, which only running it can show.
    script.write_text(
        SCRIPT.replace("lr=0.1", "lr=0.1 if 'unipar' not in sys.modules else 0.2").replace(
            "import torch\n", "import sys, torch\n"
        )
    )
    assert main(["migrate", str(script), "--verify", "--steps", "5"]) == 1
    said = capsys.readouterr().out
    assert "the runs DIFFER\nNothing was written. --diff shows the changes, and --force" in said
    assert [path.name for path in script.parent.iterdir()] == ["train.py"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_file_that_imports_the_other_is_run_and_paths_outside_are_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.txt").write_text("1 2")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a_helper.py").write_text("def read():\n    return open('../data.txt')\n")
    (tmp_path / "src" / "train.py").write_text(f"import a_helper\na_helper.read()\n{SCRIPT}")
    assert main(["migrate", str(tmp_path / "src"), "--verify"]) == 2
    said = capsys.readouterr().err
    assert "the original script failed" in said
    assert "'../data.txt'\nIt ran in a copy of the directory that is migrated; what lies" in said


ACCELERATED = """\
import accelerate, torch
accelerator = accelerate.Accelerator()
model = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.randn(32, 2), batch_size=2)
model, opt, data = accelerator.prepare(model, opt, data)
for x in data:
    opt.zero_grad()
    accelerator.backward(model(x).square().mean())
    opt.step()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.thorough
def test_processes_that_train_by_themselves_are_told_of(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text(ACCELERATED)
    assert main(["migrate", str(script), "--verify", "--steps", "4"]) == 1
    assert "lets the processes of the original train each by itself" in capsys.readouterr().out
    assert main(["migrate", str(script), "--verify", "--steps", "4", "--processes", "1"]) == 0
    assert "each by itself" not in capsys.readouterr().out


SCALED = """\
import torch
model = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
for step in range(8):
    opt.zero_grad()
    loss = model(torch.randn(4, 2)).square().mean()
    (scaler.scale(loss) / 2 + scaler.scale(loss / 2)).backward()
    scaler.step(opt)
    scaler.update()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_losses_are_noted_without_the_factor_of_a_scaler(tmp_path: Path) -> None:
    plain = SCALED.replace(", init_scale=1024.0, growth_interval=2", ", enabled=False")
    runs = []
    for source in (SCALED, plain):
        (tmp_path / "train.py").write_text(source)
        runs.append(losses_of(tmp_path, "train.py", {}, [sys.executable], timeout=120))
    assert runs[0] == runs[1]
    assert len(set(runs[0][0])) == 8


ACCUMULATED = """\
import numpy, os, torch
model = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), lr=float(os.environ.get("ACCELERATE_LR", 0.1)))
for step in range(60):
    x = torch.tensor(numpy.random.randn(4, 2), dtype=torch.float32)
    model(x).square().mean().backward()
    if step % 9 == 8:
        opt.step()
        opt.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_losses_are_recorded_until_steps_were_seen(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ACCUMULATED)
    run = run_of(tmp_path, "train.py", {}, [sys.executable], steps=5, timeout=120)
    assert run.steps == 3
    assert len(run.losses[0]) == 28
    assert run.moved is not None
    assert run.moved > 0
    # NumPy is seeded as torch is, and variables of a launcher reach the original.
    how: dict[str, Any] = {"steps": 5, "timeout": 120, "environ": {"ACCELERATE_LR": "0.2"}}
    again = run_of(tmp_path, "train.py", {}, [sys.executable], **how)
    assert again.losses[0][:9] == run.losses[0][:9]
    assert again.losses[0][9] != run.losses[0][9]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [("step % 9 == 8", "False", "no step of an optimizer was seen among the 60 backward"),
     ("0.1)", "0.0)", "6 steps of an optimizer were seen, which changed no weight, among")],
)  # fmt: skip
def test_losses_before_any_step_show_nothing(
    old: str, new: str, said: str, tmp_path: Path
) -> None:  # fmt: skip
    (tmp_path / "train.py").write_text(ACCUMULATED.replace(old, new))
    with pytest.raises(ConfigError, match=said):
        run_of(tmp_path, "train.py", {}, [sys.executable], steps=500, timeout=120)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_an_interpreter_starts_with_is_not_hidden_by_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, work = tmp_path / "own", tmp_path / "work"
    for directory in (own, work):
        directory.mkdir()
    (own / "sitecustomize.py").write_text("import os\nos.environ['OF_THE_SITE'] = '3'\n")
    steps = "range(int(os.environ['OF_THE_SITE']))"
    (work / "train.py").write_text(f"import os\n{SCRIPT.replace('range(12)', steps)}")
    monkeypatch.setenv("PYTHONPATH", str(own))
    (losses,) = losses_of(work, "train.py", {}, [sys.executable], timeout=120).values()
    assert len(losses) == 3


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_words_of_a_script_that_fails_come_without_its_launchers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "raise SystemExit('there is no data here')\n"
    )
    with pytest.raises(ConfigError, match=r"the original script failed .* gave 1\)") as caught:
        verify(tmp_path, "train.py", {}, "", launcher="torchrun", timeout=120)
    told = str(caught.value)
    assert "there is no data here" in told
    assert "ChildFailedError" not in told


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_a_launcher_has_started_ends_with_it(
    tmp_path: Path, still_running: Callable[[Iterable[int]], list[int]]
) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    (tmp_path / "train.py").write_text(
        f"import os, pathlib, time\n"
        f"pathlib.Path({str(pids)!r}, str(os.getpid())).touch()\n"
        "time.sleep(600)\n"
    )
    with pytest.raises(ConfigError, match="did not come to its end in 20 s"):
        verify(tmp_path, "train.py", {}, "", launcher="torchrun", timeout=20)
    started = [int(path.name) for path in pids.iterdir()]
    assert started
    assert not still_running(started)
