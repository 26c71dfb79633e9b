"""What a rank holds in tensors while it trains."""

from __future__ import annotations

import gc
from typing import Any

import torch

import unipar
from examples.gpt import GPT, loss
from unipar.benchmark.memory import storages
from unipar.strategy import Precision

BATCH, LENGTH = 2, 32


def held(
    placement: unipar.Placement, strategy: Any, precision: Precision, layers: int, width: int
) -> tuple[int, int]:
    """The number of parameters, and the bytes that the rank with most of them holds.

    Everything that training keeps is counted when it is at its most, before an update: parameters,
    gradients, optimizer state, and the framework's own copies and buffers.
    """
    gc.collect()
    before = storages()
    with unipar.Session(strategy=strategy, precision=precision, placement=placement) as session:
        torch.manual_seed(0)
        model = GPT(layers=layers, width=width, length=LENGTH)
        parameters = sum(p.numel() for p in model.parameters())
        engine = session.prepare(
            model, optimizer=lambda named: torch.optim.AdamW([p for _, p in named])
        )
        del model
        text = torch.zeros(BATCH, LENGTH, dtype=torch.long)
        batch = unipar.Batch((unipar.MicroBatch((text, text), BATCH),), BATCH * placement.size)
        engine.train_step(batch, loss)
        with engine.microbatch(last=True):
            engine.backward(loss(engine, (text, text)), num_items=BATCH)
        gc.collect()
        own = sum(size for place, size in storages().items() if place not in before)
        engine.step()
        return parameters, max(session.world.gather(own))
