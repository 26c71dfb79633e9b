"""Runs whose processes another program starts because ``fit`` asks it to."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from interrupting import interrupt
from torch import nn

pytestmark = pytest.mark.timeout(150)

SCRIPT = """
import json
import unipar
from torch import nn

launcher, what, steps = {launcher!r}, {what!r}, 0

def loss(model, batch):
    global steps
    steps += 1
    rank = dist.get_rank()
    if rank == 1 and steps == 4 and what == "raise":
        raise ValueError("bad batch")
    if rank == 1 and steps == 4 and what == "kill" and not (here / "killed").exists():
        (here / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "interrupt":
        time.sleep(0.1)
        (here / "stepping").touch()
    return nn.functional.mse_loss(model(batch[0]), batch[1])

torch.manual_seed(0)
x = torch.randn(64, 8)
result = unipar.fit(
    nn.Linear(8, 1), (x, x.sum(1, keepdim=True)), loss=loss, strategy="ddp", launcher=launcher,
    device="cpu", devices=2, global_batch_size=16, steps=6 if what != "interrupt" else 10000,
    optimizer={{"name": "sgd", "lr": 0.05}}, progress=False, output_dir=here / "run",
    shuffle=False,
    checkpoint={{"every_steps": 2}}, resume="auto", timeout=30,
    max_restarts=int(what == "kill"),
)
print("LOSSES", json.dumps(result.losses))
"""


def launchers(*marks) -> list:
    missing = pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun")
    return ["torchrun", pytest.param("mpi", marks=[missing, *marks])]


def plain(steps: int) -> list[float]:
    """The same steps in this process, by PyTorch alone."""
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    y = x.sum(1, keepdim=True)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        at = slice(16 * (step % 4), 16 * (step % 4 + 1))
        loss = nn.functional.mse_loss(model(x[at]), y[at])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(autouse=True)
def compiled(tmp_path, monkeypatch):
    # What DDP imports makes a directory for compiled code.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))


@pytest.mark.parametrize("launcher", launchers(pytest.mark.thorough))
def test_a_killed_rank_is_named_and_the_run_goes_on(script, launcher):
    done = script.run(SCRIPT.format(launcher=launcher, what="kill"), timeout=120)
    warning = r"Rank 1 of 2 ended without a word: .*\. Restarting all ranks \(0 restarts left\)"
    assert re.search(warning, done.stderr.replace("\n", " ")), done.stderr
    found = re.search(r"^LOSSES (.*)$", done.stdout, re.MULTILINE)
    assert found, done.stderr
    losses = json.loads(found[1])
    assert losses == pytest.approx(plain(6)[-len(losses) :], rel=1e-5)


@pytest.mark.parametrize("launcher", launchers(pytest.mark.thorough))
def test_an_error_of_another_rank_is_the_callers(script, launcher):
    done = script.run(SCRIPT.format(launcher=launcher, what="raise"), timeout=120)
    error = done.stderr.rsplit("unipar.errors.", 1)[-1]
    assert re.match(r"WorkerError: Rank 1 of 2 failed in step 4 .*ValueError: bad batch", error)
    assert "Traceback of rank 1" in error


@pytest.mark.parametrize("launcher", launchers(pytest.mark.thorough))
def test_ctrl_c_saves(script, launcher):
    process = script.start(SCRIPT.format(launcher=launcher, what="interrupt"))
    script.wait_for("stepping")
    interrupt(process)
    error = process.communicate(timeout=60)[1]
    assert error.rstrip().endswith("KeyboardInterrupt")
    assert list((script.directory / "run" / "checkpoints").glob("step-*")), error
