"""Measure steps of two ranks, of which one takes twice as long over a sample, by their shares.

python measure/speed/shares.py            the table goes to docs/how-to/unequal-devices.md
python measure/speed/shares.py --quick    a few turns, to see that it runs; nothing is written

No two devices differ here, so each block of the model waits, in proportion to its samples: a third
in the forward pass and two thirds in the backward pass, on one rank twice as long as on the other.
The ideal is measured, too: each rank alone takes steps of the whole global batch in a plain loop,
which tells its speed, and together they could not be faster than the sum of both speeds. It has no
communication; what the strategy takes for that is shown by two ranks that are alike, and have the
same speed together, in equal shares. ``shares="auto"`` is what ``fit`` decides before the first
step, here several times over: what it finds, and how long it takes.
"""

from __future__ import annotations

import argparse
import collections
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import unipar  # noqa: E402
from measure.report import Row, circumstances, milliseconds, table, write_markdown  # noqa: E402
from measure.speed.timing import in_turns  # noqa: E402
from unipar import launch  # noqa: E402
from unipar.train.shares import AutoShares  # noqa: E402

STRATEGIES = ("ddp", "fsdp")
BATCH, MICRO, WIDTH, BLOCKS = 24, 8, 64, 3
SECONDS_PER_SAMPLE = (0.05, 0.1)
"""Of a step, by rank."""
SHARES = (2, 1)
EQUAL, UNEQUAL, ALONE = "equal shares", f"`shares={list(SHARES)}`", "rank {} alone"
AUTO, ALIKE = '`shares="auto"`', "two ranks alike"


class Waiting(torch.autograd.Function):
    """Passes on what it is given, after a while."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(len(x) * seconds / 3)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        time.sleep(len(gradient) * ctx.seconds * 2 / 3)
        return gradient, None


class Block(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(WIDTH, WIDTH), seconds

    def forward(self, x: torch.Tensor) -> Any:
        return Waiting.apply(torch.tanh(self.linear(x)), self.seconds)


def build(seconds: float) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(seconds / BLOCKS) for _ in range(BLOCKS)))


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.01)


def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def measure(strategy: str, turns: int, tries: int) -> tuple[list[Row], str]:
    """Each way to share beside the ideal, in turns; and what was decided by measuring."""

    def work(placement: unipar.Placement) -> tuple[dict[str, list[float]], list[dict[str, Any]]]:
        return measure_rank(placement, strategy, turns, tries)

    found, decisions = launch.run(work, devices=len(SHARES), timeout=600)
    alone = [found[ALONE.format(rank)] for rank in range(len(SHARES))]
    ideal = [1 / sum(1 / seconds for seconds in turn) for turn in zip(*alone, strict=True)]
    compared = (
        (EQUAL, "the ideal", ideal, None),
        (UNEQUAL, "the ideal", ideal, None),
        (AUTO, "the ideal", ideal, 1.1),
        (ALIKE, "the ideal", ideal, None),
        (UNEQUAL, ALIKE, found[ALIKE], 1.1),
        (AUTO, ALIKE, found[ALIKE], 1.1),
    )
    rows = [
        Row.timed(f"`{strategy}`, {name}, beside {of}", found[name], other, milliseconds, aim)
        for name, of, other, aim in compared
    ]
    return rows, said(strategy, decisions)


def said(strategy: str, decisions: Sequence[dict[str, Any]]) -> str:
    """What measuring has decided on, most often first, and how long it took."""
    parts = collections.Counter(tuple(decision["parts"]) for decision in decisions)
    each = ", ".join(
        f"{' and '.join(map(str, found))} samples {count} times"
        for found, count in parts.most_common()
    )
    seconds = median(decision["seconds"] for decision in decisions)
    return f"Under `{strategy}` auto found {each}, in {seconds:.1f} s (median)."


def measure_rank(
    placement: unipar.Placement, strategy: str, turns: int, tries: int
) -> tuple[dict[str, list[float]], list[dict[str, Any]]]:
    """Seconds from when all ranks begin a step until all have ended it, by contender and turn.

    And what each of several tries has found.
    """
    torch.set_num_threads(1)
    data = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(0))
    with unipar.Session(strategy, device="cpu", placement=placement) as session:
        own = SECONDS_PER_SAMPLE[placement.rank]
        alike = len(SHARES) / sum(1 / seconds for seconds in SECONDS_PER_SAMPLE)

        decisions: list[dict[str, Any]] = []

        def noted(**decision: Any) -> None:
            decisions.append(decision)

        def together(
            name: str, seconds: float, shares: Sequence[float] | None = None, *, auto: bool = False
        ) -> Callable[[], None]:
            engine = session.prepare(build(seconds), optimizer=sgd, name=name)
            loader = session.loader(
                data, global_batch_size=BATCH, micro_batch_size=MICRO, shares=shares
            )
            for _ in range(tries if auto else 0):
                # Each from equal shares; the last one is kept.
                measured = AutoShares(
                    engine, loader.with_shares([1, 1]), loss, session.world, noted
                )
                measured.measure()
                loader = measured.cut(loader.with_shares([1, 1]))
            batches = endless(loader)

            def step() -> None:
                engine.train_step(next(batches), loss)

            return step

        def alone(rank: int) -> Callable[[], None]:
            return plain(own, data) if placement.rank == rank else lambda: None

        steps = {
            EQUAL: together("equal", own),
            UNEQUAL: together("unequal", own, SHARES),
            AUTO: together("auto", own, auto=True),
            ALIKE: together("alike", alike),
        }
        steps |= {ALONE.format(rank): alone(rank) for rank in range(placement.size)}
        contenders = {name: from_all(step) for name, step in steps.items()}
        for contender in contenders.values():
            contender()
        return in_turns(contenders, turns), decisions


def endless(loader: unipar.Loader) -> Iterator[unipar.Batch]:
    while True:
        yield from loader


def plain(seconds: float, data: torch.Tensor) -> Callable[[], None]:
    """A loop over whole global batches that has nothing of unipar in it."""
    model = build(seconds)
    optimizer = sgd(model.named_parameters())

    def step() -> None:
        optimizer.zero_grad()
        for part in data.split(MICRO):
            (loss(model, part) * (len(part) / BATCH)).backward()
        optimizer.step()

    return step


def from_all(step: Callable[[], None]) -> Callable[[], float]:
    def run() -> float:
        dist.barrier()
        began = time.perf_counter()
        step()
        dist.barrier()
        return time.perf_counter() - began

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few turns; figures mean nothing")
    args = parser.parse_args()
    began = time.perf_counter()
    amounts = (2, 1) if args.quick else (15, 5)
    found = [measure(strategy, *amounts) for strategy in STRATEGIES]
    rows = [row for measured, _ in found for row in measured]
    about = circumstances("python measure/speed/shares.py", time.perf_counter() - began, ())
    fast, slow = (seconds * 1e3 for seconds in SECONDS_PER_SAMPLE)
    shape = (
        f"{BATCH} samples a step, micro_batch_size={MICRO}; ranks wait {fast:g} and {slow:g} ms "
        f"for each sample. {' '.join(decided for _, decided in found)}"
    )
    text = f"{about} {shape}\n\n{table(rows)}"
    print(text)
    if not args.quick:
        write_markdown(ROOT / "docs" / "how-to" / "unequal-devices.md", text)


if __name__ == "__main__":
    main()
