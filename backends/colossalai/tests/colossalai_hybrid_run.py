"""A run as a user would start it: ``python colossalai_hybrid_run.py SIZES LOG_LEVEL [kill]``.

The caller's model is compared with the checkpoint that the run leaves, and its loss with what the
run has evaluated. With ``kill``, rank 0 is killed in the run.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import tempfile
from pathlib import Path

import torch
from colossalai_models import BATCH, Sentences, adamw, entropy, language_model

import unipar
from unipar.callbacks import Callback, RunInfo, StepRecord


class Kill(Callback):
    """Kills rank 0 between two steps; the others go on, into the schedule."""

    every_rank = True

    def on_step_end(self, run: RunInfo, record: StepRecord) -> None:
        if run.rank == 0 and record.step == 4:
            os.kill(os.getpid(), signal.SIGKILL)


def main(sizes: str, log_level: str, kill: str = "") -> None:
    model, data = language_model(), Sentences()
    with tempfile.TemporaryDirectory() as directory:
        result = unipar.fit(
            model,
            data,
            eval_data=data,
            strategy=f"colossalai:plugin=hybrid,{sizes}",
            optimizer=adamw,
            devices=2,
            device="cpu",
            global_batch_size=BATCH,
            micro_batch_size=4,
            steps=6,
            checkpoint=directory,
            progress=False,
            callbacks=[Kill()] if kill else [],
            log_level=log_level,
            timeout=60,
        )
        assert result.checkpoint is not None
        stored = unipar.checkpoint.load_model(Path(result.checkpoint), language_model(seed=1))
    same = all(map(torch.equal, stored.state_dict().values(), model.state_dict().values()))
    with torch.no_grad():
        total, count = entropy(model, data[:])
    evaluated = math.isclose(result.metrics["loss"], float(total / count), rel_tol=1e-5)
    steps = result.history[-1].step
    print(f"steps: {steps}, the stored weights: {same}, the loss it evaluated: {evaluated}")


if __name__ == "__main__":
    main(*sys.argv[1:])
