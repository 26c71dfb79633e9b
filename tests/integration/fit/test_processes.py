"""``fit`` with processes of its own, or under a launcher's: what a user starts at a terminal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import traceback
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from outputs import own
from small_run import Watched, build, data, make_scheduler, reference, settings

from unipar import Callback, fit
from unipar.errors import DataError
from unipar.train.watching.runs import read_run

HERE = Path(__file__).parent


def start(command: list[str], **kwargs: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)},
        **kwargs,
    )


def python(*arguments: str) -> tuple[str, str]:
    process = start([sys.executable, "-W", "ignore", *arguments])
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return own(out), err


def test_two_processes_train_the_callers_module(tmp_path: Path):
    """The weights are those of the result's checkpoint, and of the plain loop."""
    model = build()
    parameters = list(model.parameters())
    result = fit(
        model,
        data(),
        **settings(
            tmp_path,
            strategy="ddp",
            devices=2,
            lr_scheduler=make_scheduler,
            eval_data=data(),
            checkpoint={"every_steps": 3},
        ),
    )
    losses, expected = reference(scheduler=True)
    assert result.losses == pytest.approx(losses, rel=1e-5)
    assert result.world_size == 2
    assert result.checkpoint == tmp_path / "checkpoints" / "step-00000006"
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-6)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 6


SCRIPT = """
    import sys, torch, unipar
    from torch import nn

    scale = 2.0
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 1)
        def forward(self, x):
            return self.inner(x) * scale

    model = Model()
    before = model.inner.weight.clone()
    result = unipar.fit(
        model, torch.randn(16, 3), strategy="ddp", devices=2, global_batch_size=4, steps=2,
        loss=lambda m, x: m(x).square().mean(),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        output_dir=sys.argv[-1], progress=False, checkpoint=False,
    )
    print("steps", len(result.losses), "trained", not torch.equal(before, model.inner.weight))
"""


@pytest.mark.parametrize("way", ["script", pytest.param("-c", marks=pytest.mark.thorough)])
def test_a_program_without_a_main_guard_with_lambdas(tmp_path: Path, way: str):
    source = textwrap.dedent(SCRIPT)
    script = tmp_path / "script.py"
    script.write_text(source)
    arguments = [str(script)] if way == "script" else ["-c", source]
    out, _ = python(*arguments, str(tmp_path / "run"))
    assert out.splitlines()[-1] == "steps 2 trained True"


def test_under_torchrun_it_joins_the_ranks_that_it_finds(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os
            from pathlib import Path
            from small_run import build, data, settings
            from unipar import fit
            values = settings(Path({str(tmp_path / "run")!r}), strategy="fsdp", checkpoint={{}})
            result = fit(build(), data(), **values)
            Path({str(tmp_path)!r}, os.environ["RANK"]).write_text(repr(result.losses))
            """
        )
    )
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    python(*torchrun, str(script))
    for rank in "01":
        losses = json.loads((tmp_path / rank).read_text())
        assert losses == pytest.approx(reference()[0], rel=1e-5)


def test_ranks_under_torchrun_share_one_directory_whatever_their_clocks_say(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, time
            from pathlib import Path
            from small_run import build, data, settings
            from unipar import fit
            time.sleep(1.2 * int(os.environ["RANK"]))
            os.chdir({str(tmp_path)!r})
            values = settings(Path("unused"), strategy="ddp", checkpoint={{}})
            result = fit(build(), data(), **{{**values, "output_dir": None}})
            Path(os.environ["RANK"]).write_text(str(result.checkpoint))
            """
        )
    )
    python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script))
    written = {(tmp_path / rank).read_text() for rank in "01"}
    assert len(written) == 1
    assert len(list((tmp_path / "runs").iterdir())) == 1


class DieOnce(Callback):
    """Kills its process at a step of the first attempt."""

    every_rank = True

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def on_step_end(self, run: Any, record: Any) -> None:
        if run.rank == 1 and record.step == 5 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_is_restarted_from_the_newest_checkpoint(tmp_path: Path):
    model = build()
    result = fit(
        model,
        data(),
        **settings(
            tmp_path / "run",
            strategy="ddp",
            devices=2,
            max_restarts=1,
            lr_scheduler=make_scheduler,
            checkpoint={"every_steps": 2, "async": False},
            callbacks=[DieOnce(tmp_path / "died")],
        ),
    )
    assert (tmp_path / "died").exists()
    losses, expected = reference(scheduler=True)
    assert [r.step for r in result.history] == [5, 6]
    assert result.losses == pytest.approx(losses[4:], rel=1e-5)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_an_error_in_a_process_reaches_the_caller_with_its_traceback(
    tmp_path: Path, num_workers: int
):
    def broken() -> None:
        raise ValueError("pixel data is truncated")

    with pytest.raises(DataError, match="rank 1: sample 5 of Watched raised ValueError") as caught:
        fit(
            build(),
            Watched(5, broken),
            **settings(tmp_path, strategy="ddp", devices=2, shuffle=False, num_workers=num_workers),
        )
    shown = "".join(traceback.format_exception(caught.value))
    assert 'raise ValueError("pixel data is truncated")' in shown


SLOW = """
    import sys, time
    from pathlib import Path
    from small_run import build, data, settings
    from unipar import Callback, fit

    class Slow(Callback):
        def on_step_end(self, run, record):
            Path(sys.argv[1], "step").write_text(str(record.step))
            time.sleep(0.3)

    values = settings(Path(sys.argv[1], "run"), strategy=sys.argv[2], devices=int(sys.argv[3]),
                      steps=60, checkpoint={}, callbacks=[Slow()])
    fit(build(), data(), **values)
"""


STUCK = """
import sys, time
from pathlib import Path
from small_run import build, data, settings
from unipar import Callback, fit

class Stuck(Callback):
    def on_step_end(self, run, record):
        if record.step == 3:
            Path(sys.argv[1], "step").touch()
            time.sleep(60)

values = settings(Path(sys.argv[1], "run"), strategy="ddp", devices=2, steps=60,
                  checkpoint={"every_steps": 2, "async": False}, callbacks=[Stuck()])
fit(build(), data(), **values)
"""


def test_a_run_that_a_second_ctrl_c_ends_is_interrupted_and_not_lost(tmp_path: Path):
    process = start(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(STUCK), str(tmp_path)],
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "step").exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    found = read_run(tmp_path / "run")
    assert (found.state, found.why) == ("interrupted", "SIGINT"), err
    assert "unipar: interrupted before all ranks had saved; the newest checkpoint is " in err
    assert "step-00000002, continue with resume='auto'" in err


@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("ddp", 2)])
def test_ctrl_c_saves_and_the_run_goes_on_from_there(
    tmp_path: Path, strategy: str, devices: int, still_running
):
    process = start(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(SLOW), str(tmp_path), strategy,
         str(devices)],
        start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (tmp_path / "step").exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= devices - 1
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT), err
    assert "KeyboardInterrupt" in err
    assert "interrupted after step" in err
    assert still_running(member.pid for member in family) == []
    result = fit(
        build(), data(), **settings(tmp_path / "run", checkpoint={}, resume="auto", steps=60)
    )
    assert 0 < len(result.losses) < 60
    whole = reference(60)[0]
    assert result.losses == pytest.approx(whole[-len(result.losses) :], rel=1e-4)
