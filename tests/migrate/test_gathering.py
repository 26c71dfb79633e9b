"""State dicts that are whole whatever a strategy divides, and load again."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from unipar.migrate.launchers import command

# A script does the same however its interpreter has begun; what a user's own does is proved by
# test_verify_command.py.
pytestmark = pytest.mark.usefixtures("forked_programs")

SCRIPT = """\
import torch
from torch import nn
from unipar.migrated import script

script.open()
rank = script.world().rank
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3), nn.BatchNorm1d(3))
optimizer = script.prepare(
    model, optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.1)
).optimizer


def train(first):
    losses = []
    for step in range(first, first + 3):
        generator = torch.Generator().manual_seed(2 * step + rank)
        loss = script.engine(model)(torch.randn(8, 5, generator=generator)).square().mean()
        script.backward(loss, optimizer)
        script.engine(optimizer).step()
        losses.append(loss.item())
    return losses


train(0)
weights = script.gathered(model).state_dict()
state = script.gathered(optimizer).state_dict()
assert weights["0.weight"].shape == state["state"]["0.weight"]["exp_avg"].shape == (7, 5)
assert state["param_groups"][0]["params"][0] == "0.weight"
wanted = train(3)
on_main = [script.gathered(one, rank0_only=True).state_dict() for one in (model, optimizer)]
assert bool(on_main[0]) == bool(on_main[1]) == (rank == 0)
for given in ((weights, state), (weights, state) if rank == 0 else ({}, {})):
    script.gathered(model).load_state_dict(given[0])
    script.gathered(optimizer).load_state_dict(given[1])
    assert train(3) == wanted, "it went on otherwise than before"
print("the same again")
script.close()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "strategy", ["fsdp", *(pytest.param(s, marks=pytest.mark.thorough) for s in ("ddp", "zero3"))]
)
def test_a_gathered_state_goes_on_where_it_was(strategy: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "unipar.yaml").write_text(f"strategy: {strategy}\ndevice: cpu\n")
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command("torchrun", 2), "train.py"],
        cwd=tmp_path, env=environ, timeout=240, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the same again") == 2
