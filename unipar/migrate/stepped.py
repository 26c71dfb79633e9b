"""Engines that count micro-batches by themselves: what scripts migrated from DeepSpeed call.

``backward()`` and ``step()`` are called for every micro-batch, and every so many of them the
weights are updated::

    from unipar.migrate import stepped

    engine, optimizer, _, _ = stepped.initialize(
        model, optimizer=lambda named: SGD([p for _, p in named], 0.1), accumulation_steps=4
    )
    for x, y in loader:
        loss = criterion(engine(x), y)
        engine.backward(loss)
        engine.step()
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from unipar.errors import ConfigError
from unipar.migrate import script
from unipar.migrate.schedules import Warmup
from unipar.migrate.stepping import SteppedEngine
from unipar.strategy import OptimizerFactory

_WORKERS = 2


def initialize(
    model: nn.Module,
    *,
    optimizer: OptimizerFactory | torch.optim.Optimizer,
    lr_scheduler: Any = None,
    train_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    accumulation_steps: int | None = None,
    max_grad_norm: float | None = None,
    training_data: Dataset | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    drop_last: bool = False,
) -> tuple[SteppedEngine, torch.optim.Optimizer | None, DataLoader | None, Any]:
    """Put a model under the strategy of ``unipar.yaml``. Collective.

    Args:
        model: stays usable as it is; calls that lead to a loss go through the engine.
        optimizer: called with the named parameters once they have their final form; or one that
            ``script.prepare`` has made of the model.
        lr_scheduler: is stepped after every update; or called with the optimizer to make it.
        train_batch_size: samples of a step over all ranks.
        micro_batch_size: samples of a micro-batch on a rank.
        accumulation_steps: micro-batches of a step. Of these three numbers, those left out follow
            from the others.
        max_grad_norm: the 2-norm that gradients are clipped to in each step.
        training_data: what to make a loader of, shuffled and divided among ranks.
        collate_fn: for it.
        drop_last: likewise.

    Returns:
        The engine, its optimizer, the loader if there is data, and the scheduler.

    Raises:
        ConfigError: the batch sizes contradict each other, or the strategy cannot do it.
    """
    size, accumulation = _batch(train_batch_size, micro_batch_size, accumulation_steps)
    if isinstance(optimizer, torch.optim.Optimizer):
        engine = script.engine(optimizer)
    else:
        engine = script.prepare(model, optimizer=optimizer, max_grad_norm=max_grad_norm)
    if callable(lr_scheduler) and not hasattr(lr_scheduler, "step"):
        lr_scheduler = lr_scheduler(engine.optimizer)
    made = SteppedEngine(
        engine,
        model,
        accumulation_steps=accumulation,
        micro_batch_size=size,
        lr_scheduler=lr_scheduler,
    )
    loader = None
    if training_data is not None:
        world = script.world()
        sampler = DistributedSampler(
            training_data, num_replicas=world.data_size, rank=world.data_rank
        )
        loader = DataLoader(
            training_data, batch_size=size, sampler=sampler, collate_fn=collate_fn,
            num_workers=_WORKERS, drop_last=drop_last,
            pin_memory=script.device().type == "cuda",
        )  # fmt: skip
    return made, engine.optimizer, loader, lr_scheduler


def add_config_arguments(
    parser: argparse.ArgumentParser, settings: str = ""
) -> argparse.ArgumentParser:
    """Let the command line go on naming the settings, which now stand in ``unipar.yaml``.

    Args:
        parser: gets ``--deepspeed`` and ``--deepspeed_config``.
        settings: the file that ``unipar.yaml`` was made of; any other is an error.
    """

    def check(given: str) -> str:
        if settings and Path(given).name != settings:
            raise argparse.ArgumentTypeError(
                f"unipar.yaml was made of {settings}, not of {given}. Change unipar.yaml instead."
            )
        return given

    group = parser.add_argument_group("settings that now stand in unipar.yaml")
    group.add_argument("--deepspeed", action="store_true", help="accepted, and means nothing")
    group.add_argument("--deepspeed_config", type=check, help="accepted, and means nothing")
    return parser


def _batch(train: int | None, micro: int | None, accumulation: int | None) -> tuple[int, int]:
    """Samples of a micro-batch on a rank, and micro-batches of a step."""
    ranks = script.world().data_size
    if train is None:
        return micro or 0, accumulation or 1
    if micro is None:
        micro = train // ranks // (accumulation or 1)
    if accumulation is None:
        accumulation = train // micro // ranks if micro else 0
    if micro * accumulation * ranks != train:
        raise ConfigError(
            f"train_batch_size={train} is not micro_batch_size={micro} times "
            f"accumulation_steps={accumulation} times {ranks} ranks. Change one of them in the "
            "call of stepped.initialize."
        )
    return micro, accumulation


__all__ = ["SteppedEngine", "Warmup", "add_config_arguments", "initialize"]
