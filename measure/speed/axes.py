"""The cost of a step of ``mesh`` beside the same parallelism in plain PyTorch: two processes.

Layers divided over both, and a pipeline of both. Ranks are no more than the cores here, so that
what is compared are steps and not turns at a core; mixes of axes need four.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

import unipar
from examples.gpt import GPT
from measure.report import Row, milliseconds
from measure.speed.timing import BASELINE, block, in_turns
from unipar import launch

BATCH, LENGTH, LAYERS, WIDTH, RANKS, MICROBATCHES = 8, 64, 4, 256, 2, 4
DIVIDED = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
Step = Callable[[], float]


def measure(*, quick: bool) -> list[Row]:
    """The same model, batch and logged loss; both loops share each process."""
    turns, steps = (2, 2) if quick else (60, 2)
    rows = []
    for what, strategy, by_hand in (
        ("layers divided, `mesh:tp=2`", {"name": "mesh", "tp": RANKS, "plan": DIVIDED}, tensor),
        ("pipeline of 4 micro-batches, `mesh:pp=2`", {"name": "mesh", "pp": RANKS}, pipeline),
    ):
        measured = launch.run(
            partial(measure_rank, strategy, by_hand, turns, steps), devices=RANKS, timeout=600
        )
        rows += [
            Row.timed(
                f"a step, {what} on {RANKS} processes, small transformer: {name}",
                values,
                measured[BASELINE],
                milliseconds,
                1.02 if name == "`engine.train_step`" else None,
            )
            for name, values in measured.items()
            if name != BASELINE
        ]
    return rows


def measure_rank(
    strategy: dict[str, Any],
    by_hand: Callable[[Any], Step],
    turns: int,
    steps: int,
    placement: unipar.Placement,
) -> dict[str, list[float]]:
    """One rank's share of the measurement: seconds of a step, by contender and turn."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, 256, (BATCH, LENGTH + 1), generator=generator)
    data = (text[:, :-1].contiguous(), text[:, 1:].contiguous())
    with unipar.Session(strategy=strategy, placement=placement) as session:
        contenders = {
            BASELINE: by_hand(data),
            "`engine.train_step`": ours(session, data),
            "the hand-written loop again": by_hand(data),
        }
        for step in contenders.values():
            block(step, max(3, steps))()
        gc.collect()
        gc.disable()

        def together(step: Step) -> Callable[[], float]:
            timed = block(step, steps)

            def run() -> float:
                dist.barrier()
                return timed()

            return run

        return in_turns({name: together(step) for name, step in contenders.items()}, turns)


def model() -> GPT:
    """With a head of its own, which by hand is on another stage than the embedding."""
    torch.manual_seed(0)
    net = GPT(LAYERS, WIDTH, length=LENGTH)
    net.head.weight = nn.Parameter(net.head.weight.detach().clone())
    return net


def next_byte(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tensor(data: Any) -> Step:
    """Layers divided by hand, as PyTorch's tutorial does."""
    net = model()
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in net.blocks:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in net.parameters():
        groups[isinstance(parameter, DTensor)].append(parameter)
    optimizer = torch.optim.AdamW([{"params": group} for group in groups.values()], lr=1e-3)

    def step() -> float:
        optimizer.zero_grad()
        value = next_byte(net(data[0]), data[1])
        value.backward()
        optimizer.step()
        return value.item()

    return step


class Half(nn.Module):
    """The layers of one of two stages."""

    def __init__(self, whole: GPT, *, first: bool) -> None:
        super().__init__()
        half = LAYERS // 2
        self.first = first
        self.blocks = whole.blocks[:half] if first else whole.blocks[half:]
        if first:
            self.tokens, self.positions = whole.tokens, whole.positions
        else:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for layer in self.blocks:
            x = layer(x)
        return x if self.first else self.head(self.norm(x))


def pipeline(data: Any) -> Step:
    """Two stages by hand, under PyTorch's own schedule."""
    rank = dist.get_rank()
    stage = Half(model(), first=rank == 0)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3)
    schedule = Schedule1F1B(
        PipelineStage(stage, rank, RANKS, torch.device("cpu")), MICROBATCHES, loss_fn=next_byte
    )

    def step() -> float:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(data[0])
            logged = torch.zeros(())
        else:
            losses: list[torch.Tensor] = []
            schedule.step(target=data[1], losses=losses)
            logged = torch.stack(losses).mean().detach()
        optimizer.step()
        dist.broadcast(logged, RANKS - 1)
        return logged.item()

    return step


def ours(session: unipar.Session, data: Any) -> Step:
    engine = session.prepare(
        model(), optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3)
    )
    size = BATCH
    if session.world.layout.pp > 1:
        size //= MICROBATCHES
    parts = zip(*(part.split(size) for part in data), strict=True)
    batch = unipar.Batch(tuple(unipar.MicroBatch(part, size) for part in parts), BATCH)
    objective = unipar.Objective(
        inputs=lambda batch: batch[:1],
        loss=lambda logits, batch: next_byte(logits, batch[1]),
    )
    return lambda: engine.train_step(batch, objective).loss
