"""A run saved under any strategy on any number of ranks goes on under any other: the proof's parts.

Every source trains :data:`HALF` steps and saves. Every target resumes each of those checkpoints in
turn, in one engine that the resumed run before has left in some other state, and trains on to
:data:`STEPS`. The losses are those of one undisturbed plain loop.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from unipar.data import Loader
from unipar.loss import LossSum
from unipar.objective import Objective
from unipar.session import Session
from unipar.strategy import Engine, Precision
from unipar.testing import reference
from unipar.testing.compare import relative
from unipar.testing.kit import HALF_PRECISION_FACTOR
from unipar.testing.models import LENGTH, VOCABULARY, Block, Samples, sentences
from unipar.testing.pool import WorldPools
from unipar.testing.scenarios import HALF_DTYPES, predict_tokens
from unipar.world import Placement

HALF, STEPS, BATCH = 10, 20, 8
SAMPLES = 52  # does not divide by the batch, and ten steps end inside the second epoch
RELATIVE = 1e-5


class Where(NamedTuple):
    """A strategy on a number of ranks."""

    strategy: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.strategy}@{self.ranks}"


class Language(nn.Module):
    """Tied weights, a frozen layer, and a buffer that every step changes and the loss depends on.

    Its widths divide by neither two nor four, so that shards are of unequal size.
    """

    def __init__(self, *, elsewhere: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(elsewhere))
            self.embedding = nn.Embedding(VOCABULARY, 9)
            self.position = nn.Linear(LENGTH, 9, bias=False).requires_grad_(False)
            self.blocks = nn.ModuleList(Block(9) for _ in range(2))
            self.head = nn.Linear(9, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("calls", torch.tensor(100.0 if elsewhere else 0.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position.weight.T
        for block in self.blocks:
            x = block(x)
        self.calls += 1.0
        return self.head(x) * (1 + self.calls / 50)


def loss_sum(model: Any, batch: Any) -> LossSum:
    return LossSum(*predict_tokens(model, batch))


IN_PARTS = Objective(
    inputs=lambda batch: batch["tokens"],
    loss=lambda logits, batch: loss_sum(lambda _: logits, batch),
)
"""The same, for a strategy that cuts the model."""


def make_optimizer(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    trained = [(name, p) for name, p in named if p.requires_grad]
    flat = [p for name, p in trained if name.endswith("bias") or "norm" in name]
    deep = [p for name, p in trained if not (name.endswith("bias") or "norm" in name)]
    groups = [{"params": deep}, {"params": flat, "weight_decay": 0.0, "lr": 5e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)


def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=[2e-2, 1e-2], total_steps=STEPS + 1
    )


def data() -> Samples:
    return sentences(SAMPLES)


@functools.cache
def uninterrupted(
    autocast: torch.dtype | None = None, half_weights: torch.dtype | None = None
) -> list[float]:
    """The losses of twenty steps of a plain loop in one process."""
    loader = Loader(data(), global_batch_size=BATCH, shuffle=True)
    batches: list[list[Any]] = []
    while len(batches) < STEPS:
        batches += [[microbatch.data for microbatch in batch] for batch in loader]
    trace = reference.train(
        Language(),
        batches[:STEPS],
        predict_tokens,
        make_optimizer,
        make_scheduler=make_scheduler,
        max_grad_norm=0.5,
        autocast=autocast,
        half_weights=half_weights,
    )
    return trace.losses


@functools.cache
def bound(precision: Precision = "fp32") -> float:
    """How far a resumed run's losses may be from the undisturbed fp32 run's.

    In half precision, a few times as far as rounding takes the plain loop, whichever way it rounds.
    """
    if precision == "fp32":
        return RELATIVE
    dtype = HALF_DTYPES[precision]
    curves = uninterrupted(autocast=dtype), uninterrupted(half_weights=dtype)
    return HALF_PRECISION_FACTOR * max(difference(curve, uninterrupted()) for curve in curves)


def prepare(session: Session, *, elsewhere: bool) -> tuple[Engine, Loader]:
    engine = session.prepare(
        Language(elsewhere=elsewhere),
        optimizer=make_optimizer,
        lr_scheduler=make_scheduler,
        max_grad_norm=0.5,
    )
    return engine, session.loader(data(), global_batch_size=BATCH, shuffle=True)


def train(engine: Engine, loader: Loader, steps: int, *, in_parts: bool = False) -> list[float]:
    loss = IN_PARTS if in_parts else loss_sum

    def endless() -> Iterator[Any]:
        while True:
            yield from loader

    losses: list[float] = []
    for batch in endless():
        losses.append(engine.train_step(batch, loss).loss)
        if len(losses) == steps:
            return losses
    raise AssertionError


def train_and_save(
    placement: Placement, strategy: str, directory: Path, precision: Precision = "fp32"
) -> list[float]:
    with Session(strategy, precision=precision, device="cpu", placement=placement) as session:
        engine, loader = prepare(session, elsewhere=False)
        losses = train(engine, loader, HALF, in_parts=session.capabilities.pipeline)
        session.save(directory, loader=loader)
    return losses


def resume_each(
    placement: Placement,
    strategy: str,
    paths: list[Path],
    optimizer: bool = True,
    precision: Precision = "fp32",
) -> list[tuple[int, list[float]]]:
    """For each checkpoint, the step it was saved at and the losses of the steps after it."""
    runs = []
    with Session(strategy, precision=precision, device="cpu", placement=placement) as session:
        engine, loader = prepare(session, elsewhere=True)
        for path in paths:
            step = session.load(path, loader=loader, optimizer=optimizer)
            in_parts = session.capabilities.pipeline
            runs.append((step, train(engine, loader, STEPS - HALF, in_parts=in_parts)))
    return runs


def save_all(
    places: Sequence[Where], pools: WorldPools, root: Path, precision: Precision = "fp32"
) -> dict[Where, Path]:
    """A checkpoint of step :data:`HALF` from each place.

    Raises:
        AssertionError: the first half already went another way than the undisturbed run.
    """
    saved = {}
    for number, place in enumerate(places):
        directory = root / f"source-{number}"
        runs = pools(place.ranks).run(train_and_save, place.strategy, directory, precision)
        for of_rank in runs:
            if not difference(of_rank, uninterrupted()[:HALF]) <= bound(precision):
                raise AssertionError(f"{place}: {of_rank}, not {uninterrupted()[:HALF]}")
        saved[place] = directory
    return saved


def go_on(
    target: Where, saved: Mapping[Where, Path], pools: WorldPools, precision: Precision = "fp32"
) -> dict[Where, float]:
    """Resume each checkpoint at ``target``, and train the second half.

    Returns:
        For each source, the largest relative difference of a loss from the undisturbed run's, over
        the steps and ranks.

    Raises:
        AssertionError: a checkpoint is not of step :data:`HALF`.
    """
    expected = uninterrupted()[HALF:]
    apart = dict.fromkeys(saved, 0.0)
    paths = list(saved.values())
    for runs in pools(target.ranks).run(resume_each, target.strategy, paths, True, precision):
        for source, (step, losses) in zip(saved, runs, strict=True):
            if step != HALF:
                raise AssertionError(f"{source} -> {target}: goes on from step {step}")
            apart[source] = max(apart[source], difference(losses, expected))
    return apart


def assert_goes_on(
    target: Where, saved: Mapping[Where, Path], pools: WorldPools, precision: Precision = "fp32"
) -> None:
    """Assert that :func:`go_on` makes the undisturbed run's second half of each checkpoint."""
    wrong = [
        f"{source} -> {target}: losses differ by {apart:.1e} of the undisturbed run's"
        for source, apart in go_on(target, saved, pools, precision).items()
        if not apart <= bound(precision)
    ]
    if wrong:
        raise AssertionError("\n".join(wrong))


def difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference of two curves of one length; infinite where one is NaN."""
    return max(relative(loss, wanted) for loss, wanted in zip(losses, expected, strict=True))
