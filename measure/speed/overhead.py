"""What a training step costs beside the hand-written loop: tiny model, one process."""

from __future__ import annotations

import gc
import logging
import warnings
from collections import defaultdict
from collections.abc import Callable
from time import process_time
from typing import Any

import torch
from torch import nn

import unipar
from measure.report import Row, microseconds
from measure.speed.timing import BASELINE, block, in_turns

BATCH = 32
Step = Callable[[], object]


def model() -> nn.Module:
    """A perceptron of which a step takes a fraction of a millisecond."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def measure(*, quick: bool) -> list[Row]:
    """Every contender takes the same step on the same batch, in turns."""
    rounds, turns, steps = (1, 2, 5) if quick else (8, 25, 50)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    data = (
        torch.randn(BATCH, 32, generator=generator),
        torch.randint(0, 10, (BATCH,), generator=generator),
    )
    measured: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        # Fresh models every round: where one happens to lie in memory is worth about a percent.
        for name, values in _round(data, turns, steps).items():
            measured[name] += values
    aims = {"`engine.train_step`": 1.02}
    return [
        Row.timed(
            f"a step, 1 process, tiny MLP: {name}",
            values,
            measured[BASELINE],
            microseconds,
            aims.get(name),
        )
        for name, values in measured.items()
        if name != BASELINE
    ]


def _round(data: Any, turns: int, steps: int) -> dict[str, list[float]]:
    with unipar.Session(strategy="single", device="cpu") as session:
        contenders = {
            BASELINE: plain(data),
            "`engine.train_step`": ours(session, data),
            "Lightning Fabric": fabric(data),
            "Accelerate": accelerate(data),
            "the hand-written loop again": plain(data),
        }
        for step in contenders.values():
            block(step, 2 * steps)()
        gc.collect()
        gc.disable()
        try:
            # By the processor's time: nobody waits here, but other processes may interrupt.
            blocks = {n: block(step, steps, process_time) for n, step in contenders.items()}
            return in_turns(blocks, turns)
        finally:
            gc.enable()


def plain(data: Any) -> Step:
    """The loop that everybody writes."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_fn(net, data)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def ours(session: unipar.Session, data: Any) -> Step:
    engine = session.prepare(
        model(), optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3)
    )
    batch = unipar.Batch((unipar.MicroBatch(data, BATCH),), BATCH)
    return lambda: engine.train_step(batch, loss_fn)


def fabric(data: Any) -> Step:
    from lightning_fabric import Fabric

    logging.getLogger("lightning_fabric").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        # That there is an `srun` here, and it is not used.
        warnings.simplefilter("ignore")
        fabric = Fabric(accelerator="cpu", devices=1)
    net = model()
    net, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-3))

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_fn(net, data)
        fabric.backward(loss)
        optimizer.step()
        return loss.item()

    return step


def accelerate(data: Any) -> Step:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = model()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3))

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_fn(net, data)
        accelerator.backward(loss)
        optimizer.step()
        return loss.item()

    return step
