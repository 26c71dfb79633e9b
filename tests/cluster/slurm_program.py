"""Train a small model: ``slurm_program.py LAUNCHER OUTPUT_DIR WHAT [OPTIONS [SETTINGS]]``.

WHAT happens besides: ``nothing``, ``slow`` steps, or of rank 1 an ``error``, always or in the first
start alone (``first-error``). OPTIONS are the launcher's and SETTINGS are fit's, in JSON.
"""

import json
import os
import sys
import time

import torch
from torch import nn

import unipar

_, name, output_dir, what, *options = sys.argv
launcher = {"name": name, **json.loads(options[0] if options else "{}")}
more = json.loads(options[1]) if len(options) > 1 else {}


def main() -> None:
    state = {"calls": 0}

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        state["calls"] += 1
        first = os.environ.get("SLURM_RESTART_COUNT", "0") == "0"
        fails = what == "error" or (what == "first-error" and first)
        if fails and state["calls"] == 4 and torch.distributed.get_rank() == 1:
            raise ValueError("of rank 1")
        if what == "slow":
            time.sleep(0.25)
        print("batch", state["calls"], flush=True)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    torch.manual_seed(0)
    x = torch.randn(64, 8)
    places = {"num_nodes": 2, "devices": 1} if name == "slurm" else {"devices": 2}
    settings = {"steps": 12, **places, **more}
    result = unipar.fit(
        nn.Linear(8, 1),
        (x, x.sum(1, keepdim=True)),
        loss=loss,
        strategy="ddp",
        optimizer={"name": "sgd", "lr": 0.05},
        launcher=launcher,
        device="cpu",
        global_batch_size=16,
        checkpoint={"every_steps": 2},
        output_dir=output_dir,
        progress=False,
        **settings,
    )
    print("LOSSES", [round(loss, 6) for loss in result.losses], flush=True)


main()
