"""What a step under ``ddp`` costs beside hand-written DistributedDataParallel: two processes."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import unipar
from examples.gpt import GPT, loss
from measure.report import Row, milliseconds
from measure.speed.timing import BASELINE, block, in_turns
from unipar import launch

BATCH, LENGTH, RANKS = 8, 64, 2


def measure(*, quick: bool) -> list[Row]:
    """The same model, options, batch and logged loss; both loops share each process."""
    turns, steps = (2, 2) if quick else (120, 2)

    def work(placement: unipar.Placement) -> dict[str, list[float]]:
        return measure_rank(placement, turns, steps)

    measured = launch.run(work, devices=RANKS, timeout=300)
    return [
        Row.timed(
            f"a step, `ddp` on {RANKS} processes, small transformer: {name}",
            values,
            measured[BASELINE],
            milliseconds,
            1.01 if name == "`engine.train_step`" else None,
        )
        for name, values in measured.items()
        if name != BASELINE
    ]


def measure_rank(placement: unipar.Placement, turns: int, steps: int) -> dict[str, list[float]]:
    """One rank's share of the measurement: seconds of a step, by contender and turn."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(placement.rank)
    text = torch.randint(0, 256, (BATCH, LENGTH + 1), generator=generator)
    data = (text[:, :-1].contiguous(), text[:, 1:].contiguous())
    with unipar.Session(strategy="ddp", placement=placement) as session:
        contenders = {
            BASELINE: plain(data),
            "`engine.train_step`": ours(session, data),
            "the hand-written loop again": plain(data),
        }
        for step in contenders.values():
            block(step, max(2, steps))()
        gc.collect()
        gc.disable()

        def together(step: Any) -> Any:
            timed = block(step, steps)

            def run() -> float:
                dist.barrier()
                return timed()

            return run

        return in_turns({name: together(step) for name, step in contenders.items()}, turns)


def plain(data: Any) -> Any:
    """DDP by hand, with the loss of all ranks for the log, as unipar reports it."""
    torch.manual_seed(0)
    net = DistributedDataParallel(GPT(length=LENGTH), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def step() -> float:
        optimizer.zero_grad()
        value = loss(net, data)
        value.backward()
        optimizer.step()
        logged = value.detach()
        dist.all_reduce(logged)
        return logged.item() / RANKS

    return step


def ours(session: unipar.Session, data: Any) -> Any:
    torch.manual_seed(0)
    engine = session.prepare(
        GPT(length=LENGTH),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
    )
    batch = unipar.Batch((unipar.MicroBatch(data, BATCH),), BATCH * RANKS)
    return lambda: engine.train_step(batch, loss)
