"""Bytes of parameters, gradients and optimizer state that a rank holds, beside the formula."""

from __future__ import annotations

from typing import Any

import unipar
from measure.report import Row, mebibytes
from measure.speed.held import held
from unipar import launch
from unipar.benchmark.statistics import Estimate

LAYERS, WIDTH = 4, 256
FP32 = 4

# Copies of all parameters that a rank holds under AdamW: whole ones, and ones divided by the
# number of ranks. Rajbhandari et al., "ZeRO" (2020), section 5, with fp32 throughout.
SHAPES: dict[str, tuple[Any, int, int]] = {
    "`ddp`": ("ddp", 4, 0),
    "`ddp`, `shard_optimizer`": ({"name": "ddp", "shard_optimizer": True}, 2, 2),
    "`fsdp`": ("fsdp", 0, 4),
}


def measure(*, quick: bool) -> list[Row]:
    """The largest rank's bytes; no spread, for the count is exact."""
    rows = []
    for name, (strategy, whole, divided) in SHAPES.items():
        for ranks in (2,) if quick else (2, 4):

            def work(placement: unipar.Placement, strategy: Any = strategy) -> tuple[int, int]:
                return held(placement, strategy, "fp32", LAYERS, WIDTH)

            parameters, most = launch.run(work, devices=ranks, timeout=300)
            formula = FP32 * parameters * (whole + divided / ranks)
            ratio = most / formula
            rows.append(
                Row(
                    f"bytes of a rank, {name} on {ranks} processes, beside "
                    f"{_formula(whole, divided, ranks)}",
                    mebibytes(most),
                    mebibytes(formula),
                    Estimate(median=ratio, low=ratio, high=ratio, pairs=1),
                    aim=1.05,
                    lowest=0.95,
                )
            )
    return rows


def _formula(whole: int, divided: int, ranks: int) -> str:
    terms = [f"{FP32 * whole} N"] if whole else []
    terms += [f"{FP32 * divided} N / {ranks}"] if divided else []
    return " + ".join(terms)
