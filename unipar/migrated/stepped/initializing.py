"""The making of an engine that counts micro-batches, with its loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from unipar.errors import ConfigError
from unipar.migrated import script
from unipar.migrated.stepped.engine import SteppedEngine
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
