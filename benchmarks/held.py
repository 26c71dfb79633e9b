"""What a rank holds in tensors while it trains."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.distributed.tensor import DTensor

import unipar
from examples.gpt import GPT, loss
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
        engine.backward(loss(engine, (text, text)), num_items=BATCH)
        gc.collect()
        own = sum(size for place, size in storages().items() if place not in before)
        engine.step()
        return parameters, max(session.world.gather(own))


def storages() -> dict[int, int]:
    """The memory behind all tensors of this process, by address: its size in bytes."""
    # By their types: some modules' objects run code when they are asked for their class.
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    # A gradient need not be known to Python as long as nobody has looked at it.
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    own = [tensor for tensor in tensors if not isinstance(tensor, DTensor) and not tensor.is_meta]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in own}
