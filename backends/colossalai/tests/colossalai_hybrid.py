"""Models divided by ``hybrid``, and the steps that its tests take with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from colossalai_models import (
    BATCH,
    CLIP,
    Sentences,
    Step,
    adamw,
    entropy_of,
    inputs,
    schedule,
)

from unipar import LossSum, Objective, Session

TP, PP, BOTH = (
    f"colossalai:plugin=hybrid,{sizes}"
    for sizes in ("tp_size=2", "pp_size=2", "tp_size=2,pp_size=2")
)

OWN_LOSS = Objective(inputs, lambda output, batch: LossSum(*entropy_of(output, batch)))
"""A loss of the user's, of the logits."""


def prepare(
    session: Session,
    model: torch.nn.Module,
    micro: int | None = None,
    shares: list[float] | None = None,
    **asked: Any,
) -> tuple[Any, Any]:
    """An engine, and the sentences in their order; what is asked for goes before the plain loop's.

    Args:
        session: of the strategy.
        model: one that computes its own loss.
        micro: samples of a micro-batch.
        shares: of replicas in a global batch.
        asked: of ``session.prepare``.
    """
    settings = {"optimizer": adamw, "lr_scheduler": schedule, "max_grad_norm": CLIP, **asked}
    sizes: Any = {"global_batch_size": BATCH, "micro_batch_size": micro, "shares": shares}
    loader = session.loader(Sentences(), **sizes, shuffle=False)
    return session.prepare(model, **settings), loader


def each_step(engine: Any, loader: Iterable[Any], steps: int, loss: Any = None) -> Iterator[Any]:
    """What each step returns, epoch after epoch; by the model's own loss if none is given."""
    loss = loss or Objective.of_model(engine.module)

    def endless() -> Iterator[Any]:
        while True:
            yield from loader

    return (engine.train_step(batch, loss) for batch in islice(endless(), steps))


def take(engine: Any, loader: Iterable[Any], steps: int, loss: Any = None) -> list[Step]:
    return [
        Step(step.loss, step.grad_norm, step.num_items)
        for step in each_step(engine, loader, steps, loss)
    ]
