"""No backward pass waits for a count, and what losses are divided by meanwhile rounds nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unipar import NonFiniteLossError, Session
from unipar.data.batch import Batch, MicroBatch
from unipar.engine import Reducer, StepEngine, build_optimizer
from unipar.loss import LossSum
from unipar.strategy import EngineSpec, StepResult
from unipar.world import LossReduction, Placement, World


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=1e-2)


class Told(LossReduction):
    """A reduction that says when it is waited for."""

    __slots__ = ("_events",)

    def __init__(self, events: list[str], reduction: LossReduction) -> None:
        for name in LossReduction.__slots__:
            setattr(self, name, getattr(reduction, name))
        self._events = events

    def wait(self) -> tuple[float, float]:
        self._events.append("wait")
        return super().wait()


class Telling(World):
    def __init__(self) -> None:
        super().__init__(Placement())
        self.events: list[str] = []

    def start_reduce_loss(
        self, total: Any, count: Any, scale: float = 1.0, fingerprint: int = 0
    ) -> LossReduction:
        self.events.append("reduce")
        return Told(self.events, super().start_reduce_loss(total, count, scale, fingerprint))


class TellingReducer(Reducer):
    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        assert isinstance(self.world, Telling)
        self.world.events.append("backward")
        super().backward(loss, last=last)


def terms(model: Any, x: torch.Tensor) -> LossSum:
    return LossSum(model(x).square().sum(), 3 * len(x))


def by_hand(engine: StepEngine, batch: Batch, *, told: bool) -> StepResult:
    for number, part in enumerate(batch, start=1):
        if told:
            with engine.microbatch(last=number == len(batch)):
                engine.backward(terms(engine, part.data))
        else:
            engine.backward(terms(engine, part.data))
    return engine.step()


OVERLAPPED = ["backward", "backward", "reduce", "backward", "wait"]


@pytest.mark.parametrize(
    ("step", "events"),
    [
        (lambda engine, batch: engine.train_step(batch, terms), OVERLAPPED),
        (lambda engine, batch: by_hand(engine, batch, told=True), OVERLAPPED),
        (
            lambda engine, batch: by_hand(engine, batch, told=False),
            # On one process, any pass may be the last.
            ["reduce", "backward", "reduce", "backward", "reduce", "backward", "wait"],
        ),
    ],
    ids=["train_step", "by hand", "no last named"],
)
def test_a_step_reduces_once_and_waits_after_its_last_backward_pass(
    step: Any, events: list[str]
) -> None:
    world = Telling()
    model = nn.Linear(2, 1)
    spec = EngineSpec(model, optimizer=adamw)
    reducer = TellingReducer(model, world)
    engine = StepEngine(spec, world, model, build_optimizer(spec, model), reducer=reducer)
    parts = tuple(MicroBatch(torch.randn(2, 2), 2) for _ in range(3))
    for _ in range(2):
        world.events.clear()
        assert step(engine, Batch(parts, 6)).num_items == 18
        assert world.events == events


# -- runs ----------------------------------------------------------------------------------------

TOKENS = 500
"""Items of a sample, on average."""


def sequences() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 2 * TOKENS, 4, generator=generator)
    lengths = torch.randint(0, 2 * TOKENS, (20,), generator=generator)
    kept = torch.arange(2 * TOKENS)[None] < lengths[:, None]
    return list(zip(x, kept, strict=True))


def per_token(model: Any, batch: Any) -> LossSum:
    x, kept = batch
    wrong = (model(x)[..., 0].float() - x[..., 0]).square()
    return LossSum((wrong * kept).sum(), kept.sum())


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def train(
    precision: Any,
    path: Path | None = None,
    *,
    known: float = 1.0,
    resume: bool = False,
    passed_over: int = 0,
) -> tuple[list[StepResult], list[torch.Tensor]]:
    """Ten batches of 8, 8 and 4 samples; saved after the third, or taken up there."""
    model = build()
    with Session("single", device="cpu", precision=precision) as session:
        engine: Any = session.prepare(model, optimizer=adamw, max_grad_norm=0.5)
        engine.average.items_per_sample = known
        loader = session.loader(sequences(), global_batch_size=8, micro_batch_size=4)
        seen = 0
        if resume:
            assert path is not None
            seen = session.load(path, loader=loader)
        steps: list[StepResult] = []
        while seen < 10:
            for batch in loader:
                seen += 1
                if seen > passed_over:
                    steps.append(engine.train_step(batch, per_token))
                if path is not None and not resume and seen == 3:
                    session.save(path, loader=loader)
                if seen == 10:
                    break
        return steps, [weight.detach().clone() for weight in model.parameters()]


def test_what_losses_are_divided_by_meanwhile_changes_no_bit() -> None:
    plain, weights = train("fp32")
    other, others = train("fp32", known=1000.0)
    assert plain == other
    assert all(map(torch.equal, weights, others))


def test_fp16_takes_sums_over_many_tokens() -> None:
    """Only in a run's first step is the divisor far off, and the scaler leaves that one out."""
    (first, *steps), weights = train("fp16")
    exact, expected = train("fp32", passed_over=1)
    assert first.skipped
    for step, of_exact in zip(steps, exact, strict=True):
        assert not step.skipped
        assert step.loss == pytest.approx(of_exact.loss, rel=1e-2)
        assert step.grad_norm == pytest.approx(of_exact.grad_norm, rel=2e-2)
    for own, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_resumed_run_is_the_undisturbed_one_to_the_bit(precision: str, tmp_path: Path) -> None:
    steps, weights = train(precision, tmp_path)
    rest, others = train(precision, tmp_path, resume=True)
    assert steps[3:] == rest
    assert all(map(torch.equal, weights, others))


@pytest.mark.parametrize("total", [0.0, 1.0], ids=["nothing", "a penalty"])
def test_a_global_batch_without_items_is_said_to_be_one(total: float) -> None:
    batch = Batch(tuple(MicroBatch(torch.ones(2, 3), 2) for _ in range(2)), 4)

    def masked(model: Any, x: Any) -> LossSum:
        return LossSum(model(x).sum() * 0 + total, 0)

    def plain(model: Any, x: Any) -> torch.Tensor:
        return model(x).mean()

    with Session("single", device="cpu") as session:
        engine = session.prepare(nn.Linear(3, 1), optimizer=adamw)
        engine.train_step(batch, plain)
        with pytest.raises(NonFiniteLossError, match="no item of the global batch of step 2") as e:
            engine.train_step(batch, masked)
        assert e.value.step == 2
        assert "-100" in str(e.value)
        assert "learning rate" not in str(e.value)
        assert "on_nan='skip'" in str(e.value)
    with Session("single", device="cpu", on_nan="skip") as session:
        engine = session.prepare(nn.Linear(3, 1), optimizer=adamw)
        assert engine.train_step(batch, masked).skipped


def test_a_checkpoint_without_a_place_in_the_data_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Session("single", device="cpu") as session:
        session.prepare(build(), optimizer=adamw)
        loader = session.loader(sequences(), global_batch_size=8)
        path = session.save(tmp_path)
        session.load(path)
        assert "no place" not in caplog.text
        session.load(path, loader=loader)
        assert "so the loader begins with the first epoch. Save with session.save(" in caplog.text
