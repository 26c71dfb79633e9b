"""A run as a user would start it: ``python colossalai_small_run.py PLUGIN LOG_LEVEL [DIRECTORY]``.

With a directory, rank 1 is killed once in the run, which resumes from its last checkpoint there
if there is one.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import unipar
from unipar.callbacks import Callback, RunInfo, StepRecord


class Kill(Callback):
    """Kills rank 1 once, between two steps; rank 0 goes on, into a reduction of Colossal-AI's."""

    every_rank = True

    def __init__(self, killed: Path) -> None:
        self._killed = killed

    def on_step_end(self, run: RunInfo, record: StepRecord) -> None:
        if run.rank == 1 and record.step == 4 and not self._killed.exists():
            self._killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def main(plugin: str, log_level: str, directory: str = "", restarts: str = "0") -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    result = unipar.fit(
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)),
        TensorDataset(x, x.sum(dim=1, keepdim=True)),
        strategy={"name": "colossalai", "plugin": plugin},
        loss=loss_fn,
        precision="bf16" if plugin == "gemini" else "fp32",
        devices=2,
        device="cpu",
        global_batch_size=8,
        steps=6,
        checkpoint={"directory": directory, "every_steps": 2, "async": False}
        if directory
        else False,
        progress=False,
        callbacks=[Kill(Path(directory, "killed"))] if directory else [],
        max_restarts=int(restarts),
        log_level=log_level,
        timeout=60,
    )
    print("steps:", result.history[-1].step)


if __name__ == "__main__":
    main(*sys.argv[1:])
