"""Bytes of parameters, gradients and optimizer state that a rank holds, beside the formula."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

import unipar
from benchmarks.report import Row, mebibytes
from benchmarks.timing import Ratio
from examples.gpt import GPT, loss
from unipar import launch

BATCH, LENGTH = 8, 32
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
                return held(placement, strategy)

            parameters, most = launch.run(work, devices=ranks, timeout=300)
            formula = FP32 * parameters * (whole + divided / ranks)
            ratio = most / formula
            rows.append(
                Row(
                    f"bytes of a rank, {name} on {ranks} processes, beside "
                    f"{_formula(whole, divided, ranks)}",
                    mebibytes(most),
                    mebibytes(formula),
                    Ratio(ratio, ratio, ratio, 1),
                    aim=1.05,
                    lowest=0.95,
                )
            )
    return rows


def _formula(whole: int, divided: int, ranks: int) -> str:
    terms = [f"{FP32 * whole} N"] if whole else []
    terms += [f"{FP32 * divided} N / {ranks}"] if divided else []
    return " + ".join(terms)


def held(placement: unipar.Placement, strategy: Any) -> tuple[int, int]:
    """The number of parameters, and the bytes of the rank that holds most."""
    with unipar.Session(strategy=strategy, placement=placement) as session:
        torch.manual_seed(0)
        model = GPT(layers=4, width=256, length=LENGTH)
        parameters = sum(p.numel() for p in model.parameters())
        engine = session.prepare(
            model, optimizer=lambda named: torch.optim.AdamW([p for _, p in named])
        )
        text = torch.zeros(BATCH, LENGTH, dtype=torch.long)
        batch = unipar.Batch((unipar.MicroBatch((text, text), BATCH),), BATCH * placement.size)
        engine.train_step(batch, loss)
        engine.backward(loss(engine, (text, text)), num_items=BATCH)
        own = storage_bytes(tensors(engine))
        engine.step()
        return parameters, max(session.world.gather(own))


def tensors(engine: unipar.Engine) -> Iterator[torch.Tensor]:
    """Every tensor that training keeps on this rank."""
    for parameter in engine.module.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    optimizer = engine.optimizer
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer = optimizer.optim
    assert optimizer is not None
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def storage_bytes(tensors: Iterator[torch.Tensor]) -> int:
    """Bytes of the memory behind tensors, each piece once: gradients may be views of a bucket."""
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
