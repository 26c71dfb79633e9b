"""Sweep strategy and learning rate with Ray Tune: each trial is a run of two processes.

Needs the extra ``ray``. ASHA stops the trials that are behind. Run from the repository root, on two
cores:

    python examples/tune.py
"""

# Ray is not in the environment in which types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import ray
import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from torch import nn

import unipar
from unipar.callbacks import read_metrics

STEPS = 300
SPACE = [("ddp", 0.1), ("fsdp", 0.03), ("ddp", 0.003), ("fsdp", 0.0001)]


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def train(strategy: str, lr: float, out: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(512, 8)
    unipar.fit(
        lambda: nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)),
        (x, x.sin().sum(1, keepdim=True)),
        loss=loss,
        strategy=strategy,
        optimizer={"name": "SGD", "lr": lr},
        device="cpu",
        devices=2,
        global_batch_size=64,
        steps=STEPS,
        log_every=10,
        checkpoint=False,
        progress=False,
        output_dir=out,
    )


def trial(config: dict[str, Any], out: Path) -> None:
    """One run; Tune gets the newest metrics, and ends the trial and its processes if it is behind.

    The run's processes are not the trial's own, so the metrics come by way of their file.
    """
    strategy, lr = config["run"]
    directory = out / f"{strategy}-{lr}"
    reported = 0
    with ThreadPoolExecutor() as pool:
        run = pool.submit(train, strategy, lr, directory)
        ended = False
        while not ended:
            ended = bool(wait([run], timeout=0.2).done)
            path = directory / "metrics.jsonl"
            for row in read_metrics(path)[reported:] if path.exists() else ():
                reported += 1
                tune.report(row)
        run.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/tune"), help="where runs go")
    out = parser.parse_args().out.absolute()
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=100 << 20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
    )
    tuner = tune.Tuner(
        # A CPU for each of its processes.
        tune.with_resources(tune.with_parameters(trial, out=out), {"CPU": 2}),
        param_space={"run": tune.grid_search(SPACE)},
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            scheduler=ASHAScheduler(
                time_attr="step", max_t=STEPS, grace_period=50, reduction_factor=2
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
