"""Models divided by ``hybrid``, and the steps that its tests take with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from colossalai_models import BATCH, CLIP, Sentences, Step, adamw, schedule

from unipar import Session
from unipar.loss import model_output_loss

TP, PP, BOTH = (
    f"colossalai:plugin=hybrid,{sizes}"
    for sizes in ("tp_size=2", "pp_size=2", "tp_size=2,pp_size=2")
)


def prepare(
    session: Session, model: torch.nn.Module, micro: int | None = None, **asked: Any
) -> tuple[Any, Any]:
    """An engine, and the sentences in their order; what is asked for goes before the plain loop's.

    Args:
        session: of the strategy.
        model: one that computes its own loss.
        micro: samples of a micro-batch.
        asked: of ``session.prepare``.
    """
    settings = {"optimizer": adamw, "lr_scheduler": schedule, "max_grad_norm": CLIP, **asked}
    loader = session.loader(
        Sentences(), global_batch_size=BATCH, micro_batch_size=micro, shuffle=False
    )
    return session.prepare(model, **settings), loader


def each_step(
    engine: Any, loader: Iterable[Any], steps: int, loss: Any = model_output_loss
) -> Iterator[Any]:
    """What each step returns, epoch after epoch."""

    def endless() -> Iterator[Any]:
        while True:
            yield from loader

    return (engine.train_step(batch, loss) for batch in islice(endless(), steps))


def take(
    engine: Any, loader: Iterable[Any], steps: int, loss: Any = model_output_loss
) -> list[Step]:
    return [
        Step(step.loss, step.grad_norm, step.num_items)
        for step in each_step(engine, loader, steps, loss)
    ]
