"""The abilities of the machine itself: its interconnect, and its matrix products."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from unipar.benchmark.job import BenchJob
from unipar.benchmark.result import Interconnect
from unipar.launchers.spawning import spawn
from unipar.strategy import Precision
from unipar.world import Placement, World, joined

_SIZES = tuple(4**power for power in range(5, 13))
"""Bytes of the tensors that are reduced: 1 KiB to 16 MiB."""
_REPEATS, _WARMUP = 25, 5
_SIDE = {"cpu": 1024, "cuda": 8192}
_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def answer(job: BenchJob, directory: Path, request: dict[str, Any]) -> Interconnect:
    """Measure all-reduces and matrix products between as many processes as a cell has."""
    return spawn(
        functools.partial(measure, precisions=request["precisions"]),
        devices=request["devices"],
        device=job.arguments.get("device", "auto"),
        timeout=300,
    )


def measure(placement: Placement, precisions: Sequence[Precision]) -> Interconnect:
    """On every rank; the same on all of them."""
    with joined(placement) as world:
        points = []
        if world.size > 1:
            points = [
                (size, statistics.median(_slowest(world, _reduction(size, placement))))
                for size in _SIZES
            ]
        alpha, beta = fit_line(points) if points else (0.0, 0.0)
        side = _SIDE[placement.device_type]
        # What the devices can do at their best, whatever else the machine did meanwhile.
        flops = {
            precision: 2
            * side**3
            * world.size
            / min(_slowest(world, _product(side, precision, placement)))
            for precision in precisions
            if precision in _DTYPES
        }
    return Interconnect(
        devices=world.size, points=points, alpha=alpha, beta=beta, matmul_flops=flops
    )


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """``alpha`` and ``beta`` of ``seconds = alpha + beta * bytes``.

    Least squares of the relative error, since the times differ by orders of magnitude; neither is
    below 0.
    """
    weighted = [(size, seconds, 1 / seconds**2) for size, seconds in points]
    total = sum(weight for _, _, weight in weighted)
    mean_x = sum(size * weight for size, _, weight in weighted) / total
    mean_y = sum(seconds * weight for _, seconds, weight in weighted) / total
    spread = sum(weight * (size - mean_x) ** 2 for size, _, weight in weighted)
    common = sum(weight * (size - mean_x) * (y - mean_y) for size, y, weight in weighted)
    beta = max(common / spread, 0.0)
    return max(mean_y - beta * mean_x, 0.0), beta


def _reduction(size: int, placement: Placement) -> Callable[[], object]:
    tensor = torch.zeros(size // 4, device=placement.device)
    return lambda: dist.all_reduce(tensor)


def _product(side: int, precision: Precision, placement: Placement) -> Callable[[], object]:
    factor = torch.randn(side, side, device=placement.device).to(_DTYPES[precision])
    return lambda: torch.mm(factor, factor)


def _slowest(world: World, work: Callable[[], object]) -> list[float]:
    """The slowest rank's seconds in each repeat; every rank works at once."""
    times = []
    for repeat in range(_WARMUP + _REPEATS):
        world.barrier()
        began = time.perf_counter()
        work()
        _synchronize(world.device)
        if repeat >= _WARMUP:
            times.append(time.perf_counter() - began)
    return [max(ranks) for ranks in zip(*world.gather(times), strict=True)]


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
