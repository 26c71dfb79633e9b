"""A run as a user would start it: ``python accelerate_small_run.py LOG_LEVEL [kill]``."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
from torch import nn

import unipar
from unipar.callbacks import Callback, RunInfo, StepRecord


class Kill(Callback):
    """Kills rank 1 between two steps; rank 0 goes on, into a reduction of DDP's."""

    every_rank = True

    def on_step_end(self, run: RunInfo, record: StepRecord) -> None:
        if run.rank == 1 and record.step == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def main(log_level: str, *action: str) -> None:
    x = torch.randn(64, 4)
    result = unipar.fit(
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)),
        (x, x.sum(dim=1, keepdim=True)),
        strategy="accelerate",
        loss=loss_fn,
        devices=2,
        device="cpu",
        precision="bf16",
        global_batch_size=8,
        steps=6,
        checkpoint=False,
        progress=False,
        callbacks=[Kill()] if action else [],
        log_level=log_level,
        timeout=60,
    )
    print("steps:", len(result.history))


if __name__ == "__main__":
    main(*sys.argv[1:])
