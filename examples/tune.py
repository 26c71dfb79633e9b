"""Sweep strategy and learning rate with Ray Tune: each trial is a run of two processes.

Needs the extra ``ray``. ASHA stops the trials that are behind. Run from the repository root, on two
cores:

    python examples/tune.py
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray
import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from torch import nn

import unipar

STEPS = 300
SPACE = [("ddp", 0.1), ("fsdp", 0.03), ("ddp", 0.003), ("fsdp", 0.0001)]


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def trial(config: dict[str, Any], out: Path) -> None:
    """One run; Ray's trainer tells Tune of its metrics every second."""
    torch.manual_seed(0)
    x = torch.randn(512, 8)
    strategy, lr = config["run"]
    unipar.fit(
        lambda: nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)),
        (x, x.sin().sum(1, keepdim=True)),
        loss=loss,
        strategy=strategy,
        optimizer={"name": "SGD", "lr": lr},
        launcher="ray",
        device="cpu",
        devices=2,
        global_batch_size=64,
        steps=STEPS,
        log_every=10,
        checkpoint=False,
        progress=False,
        output_dir=out / f"{strategy}-{lr}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/tune"), help="where runs go")
    out = parser.parse_args().out.absolute()
    # One CPU is for the trial itself, which only waits, and one for each of its processes.
    ray.init(
        address="local",
        num_cpus=3,
        object_store_memory=100 << 20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
    )
    tuner = tune.Tuner(
        tune.with_parameters(trial, out=out),
        param_space={"run": tune.grid_search(SPACE)},
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            max_concurrent_trials=1,
            scheduler=ASHAScheduler(
                time_attr="step", max_t=STEPS, grace_period=1, reduction_factor=2
            ),
        ),
        run_config=tune.RunConfig(storage_path=str(out), name="tune", verbose=0),
    )
    results = tuner.fit()
    for result in results:
        (strategy, lr), metrics = result.config["run"], result.metrics
        print(f"{strategy:5} {lr:<7} {metrics['step']:4} steps, loss {metrics['loss']:.4f}")
    best = results.get_best_result()
    print("best:", *best.config["run"])
    ray.shutdown()


if __name__ == "__main__":
    main()
