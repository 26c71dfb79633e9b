"""Running a hand-written loop on the same job, to see what unipar costs beside it.

A loop is a file ``NAME.py`` for the strategy ``NAME`` with a function ``train(job)``; it imports
nothing of unipar. ``job`` is a mapping with:

- ``model``: a module; ``dataset``; ``collate``: makes a batch of a list of samples;
- ``batches``: for each step the list of this rank's micro-batches, each a list of indices;
- ``loss(model, batch)``: a mean; ``optimizer(named_parameters)``; ``lr_scheduler(optimizer)`` or
  ``None``; ``max_grad_norm`` or ``None``; ``precision``: ``"fp32"``, ``"bf16"`` or ``"fp16"``;
- ``device``; ``options``: of the strategy;
- ``record(loss)``: to be called after each step with the mean loss over all ranks.

Rank and world size are in the environment, as ``torchrun`` sets them.
"""

from __future__ import annotations

import functools
import importlib.util
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unipar import launch
from unipar.benchmark.cells import Cell
from unipar.benchmark.job import BenchJob
from unipar.benchmark.records import Rank, RankRecord
from unipar.checkpoint import StoredWeights
from unipar.config import RunConfig
from unipar.data import epoch_order, open_source, shuffles, slicing_of
from unipar.engine.checks import CheckedModel
from unipar.errors import ConfigError
from unipar.loss import LossSum
from unipar.objective import Objective
from unipar.optimizers.groups import factories, holds_functions
from unipar.strategy import EngineSpec, registry, seeded_model
from unipar.utils.devices import resolve_device_type
from unipar.utils.matmul_precision import set_matmul_precision
from unipar.world import Placement, World


def loop_for(strategy: str, directory: Path) -> Path | None:
    """The file with the loop that stands for a strategy, if there is one."""
    file = directory / f"{registry.as_mapping(strategy)['name']}.py"
    return file if file.is_file() else None


def run(job: BenchJob, cell: Cell, loop: Path, directory: Path, *, began: float) -> None:
    """Run the loop on as many processes as the cell has; each leaves a file of what it found.

    Raises:
        ConfigError: the job is of a kind that loops do not take.
    """
    device = resolve_device_type(job.arguments.get("device", "auto"))
    launch.run(
        functools.partial(work, job, cell, loop, directory, began),
        devices=cell.devices,
        device_type=device,
        timeout=job.arguments.get("timeout", 1800.0),
    )


def work(
    job: BenchJob, cell: Cell, loop: Path, directory: Path, began: float, placement: Placement
) -> None:
    """One rank of :func:`run`."""
    config, loss, built = _settings(job, cell)
    source = open_source(job.arguments["data"])
    if source.is_stream:
        raise ConfigError(
            "--raw takes data with samples by index, and this is a stream. Leave --raw out."
        )
    batches = _batches(config, job.warmup + job.steps, source, placement)
    clock = _Clock(job.warmup, began)
    model = job.arguments["model"]
    if not isinstance(model, nn.Module):
        model = CheckedModel(model)
    first = config.initial_weights
    if isinstance(first, Path):
        first = StoredWeights.at(first, "model", World(Placement()))
    model = seeded_model(EngineSpec(model, seed=config.seed, initial_weights=first))
    loss = loss or Objective.of_model(model)

    def mean_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        value = loss(model, batch)
        if isinstance(value, LossSum):
            raise ConfigError(
                "--raw takes a loss that is a mean over samples, and this one counts its items. "
                "Pass loss=f with f(model, batch) -> such a mean, or leave --raw out."
            )
        return value

    options = {k: v for k, v in registry.as_mapping(cell.strategy).items() if k != "name"}
    restore = set_matmul_precision(config.float32_matmul_precision)
    try:
        _import(loop).train(
            {
                "model": model,
                "dataset": source.dataset,
                "collate": source.collate_fn,
                "batches": batches,
                "loss": mean_loss,
                **built,
                "max_grad_norm": config.max_grad_norm,
                "precision": config.precision,
                "device": placement.device,
                "options": options,
                "record": clock.record,
            }
        )
    finally:
        restore()
    samples = float(config.global_batch_size or 0)
    RankRecord(
        rank=Rank(rank=placement.rank, seconds=clock.seconds, threads=torch.get_num_threads()),
        losses=clock.losses,
        items=samples,
        samples=samples,
        setup_seconds=clock.ready - began,
        first_step_seconds=clock.first - began,
    ).write(directory)


class _Clock:
    def __init__(self, warmup: int, began: float) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.ready, self.first = time.time(), 0.0
        self._warmup, self._last = warmup, time.perf_counter()

    def record(self, loss: float) -> None:
        now = time.perf_counter()
        if not self.losses:
            self.first = time.time()
        self.losses.append(float(loss))
        if len(self.losses) > self._warmup:
            self.seconds.append(now - self._last)
        self._last = now


def _settings(job: BenchJob, cell: Cell) -> tuple[RunConfig, Any, dict[str, Any]]:
    given = job.of(cell, job.warmup + job.steps)
    names = ("optimizer", "lr_scheduler")
    objects = {name: given.pop(name) for name in names if holds_functions(given.get(name))}
    for name in ("model", "data", "strategy"):
        given.pop(name)
    loss = given.pop("loss", None)
    config = RunConfig.build(**given)
    built = factories(
        objects.get("optimizer") or config.optimizer.factory(),
        objects.get("lr_scheduler") or (config.lr_scheduler and config.lr_scheduler.factory()),
    )
    return config, loss, dict(zip(names, built, strict=True))


def _batches(config: RunConfig, steps: int, source: Any, placement: Placement) -> list[Any]:
    """The micro-batches that unipar gives to this rank, in the same order."""
    size = config.global_batch_size
    if size is None or source.num_samples is None:
        raise ConfigError("--raw needs global_batch_size, and data that knows its length.")
    micro = config.micro_batch_size if isinstance(config.micro_batch_size, int) else None
    slicing = slicing_of(size, micro, placement.rank, placement.size)
    batches: list[Any] = []
    shuffle = shuffles(config.shuffle, source)
    for epoch in range(steps):
        order = epoch_order(
            source.num_samples, seed=config.seed, epoch=epoch, shuffle=shuffle
        ).tolist()
        for first in range(0, len(order), size):
            whole = order[first : first + size]
            if len(whole) < size and source.drop_last:
                continue
            batches.append([whole[a:b] for a, b in slicing.microbatches(len(whole)) if b > a])
            if len(batches) == steps:
                return batches
    return batches


def _import(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"raw_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
