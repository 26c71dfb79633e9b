"""Evaluation runs the model once where that gives what running it twice would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from unipar import LossSum, Objective
from unipar.data.batch import Batch, MicroBatch
from unipar.engine import StepEngine
from unipar.errors import ConfigError
from unipar.evaluation.evaluate import evaluate
from unipar.strategy import EngineSpec
from unipar.world import Placement, World

WORLD = World(Placement())


class Counting(nn.Module):
    """Two heads over one layer, and how often it was run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.noise = nn.Linear(3, 4), 0.0
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(4, 3)})
        self.head, self.runs = "a", 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        x = self.heads[self.head](self.body(x))
        return x + self.noise * torch.randn_like(x) if self.noise else x


def batches() -> list[Batch]:
    """Three of two micro-batches each, of which the last one counts nothing."""
    generator = torch.Generator().manual_seed(1)
    sizes = [(3, 3), (3, 2), (2, 0)]
    found = []
    for pair in sizes:
        parts = []
        for size in pair:
            x = torch.randn(size or 1, 3, generator=generator)
            parts.append(MicroBatch((x, x.argmax(dim=1)), size))
        found.append(Batch(tuple(parts), sum(pair)))
    return found


def first(batch: Any) -> Any:
    return batch[0]


def plain(model: Any, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def wrong(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (predictions.argmax(dim=1) != targets).float().mean()


def margin(predictions: torch.Tensor, targets: torch.Tensor) -> LossSum:
    return LossSum(predictions.gather(1, targets[:, None]).sum(), len(targets))


def apart(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return model(batch[0]), batch[1]


METRICS = {"wrong": wrong, "margin": margin}
OBJECTIVE = Objective(first, lambda output, batch: cross_entropy(output, batch[1]))
SAME = Objective(first, lambda output, batch: (output, batch[1]))
OTHER = Objective(lambda batch: batch[0], lambda output, batch: (output, batch[1]))


def expected(model: Counting, loss: Callable[[Any, Any], Any] = plain) -> dict[str, float]:
    """By a loop of its own, which runs the model for each."""
    sums = {"loss": 0.0, "wrong": 0.0, "margin": 0.0}
    count = 0
    with torch.no_grad():
        for part in (part for batch in batches() for part in batch if part.num_samples):
            predictions = model(part.data[0])
            sums["wrong"] += float(wrong(predictions, part.data[1])) * part.num_samples
            sums["margin"] += float(margin(predictions, part.data[1]).total)
            sums["loss"] += float(loss(model, part.data)) * part.num_samples
            count += part.num_samples
    return {name: total / count for name, total in sums.items()}


def found(model: Counting, loss: Any, predict: Any = None) -> tuple[dict[str, float], int]:
    """The metrics, and how often the model was run."""
    engine = StepEngine(EngineSpec(model), WORLD, model)
    model.runs = 0
    values = evaluate(engine, batches(), loss, WORLD, metrics=METRICS, predict=predict)
    engine.close()
    return values, model.runs


@pytest.mark.parametrize(
    ("loss", "predict", "runs"),
    [
        pytest.param(OBJECTIVE, SAME, 6, id="two objectives of the same inputs"),
        pytest.param(OBJECTIVE, None, 6, id="an objective, and pairs"),
        pytest.param(plain, None, 8, id="a function that is watched in the first batch"),
        pytest.param(plain, SAME, 8, id="a function and an objective"),
        pytest.param(OBJECTIVE, OTHER, 12, id="objectives of other inputs"),
        pytest.param(plain, apart, 12, id="two functions"),
        pytest.param(None, None, 6, id="no loss"),
    ],
)
def test_the_model_is_run_once_where_the_calls_are_known(loss: Any, predict: Any, runs: int):
    model = Counting()
    values, counted = found(model, loss, predict)
    assert counted == runs
    twice, counted = found(model, loss, apart)
    assert counted == (6 if loss is None else 12)
    assert values == twice
    wanted = expected(model)
    assert values == pytest.approx({name: wanted[name] for name in values}, rel=1e-6)
    assert ("loss" in values) == (loss is not None)


def two_heads(model: Any, batch: Any) -> torch.Tensor:
    model.head = "b"
    try:
        return plain(model, batch)
    finally:
        model.head = "a"


def two_calls(model: Any, batch: Any) -> torch.Tensor:
    return plain(model, batch) + (model(-batch[0]) ** 2).mean()


def other_arguments(model: Any, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0] * 2), batch[1])


def other_weights(model: Any, batch: Any) -> torch.Tensor:
    doubled = {name: 2 * value for name, value in model.named_parameters()}
    return cross_entropy(torch.func.functional_call(model, doubled, (batch[0],)), batch[1])


def written_over(model: Any, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0]).mul_(2), batch[1])


@pytest.mark.parametrize(
    "loss", [two_heads, two_calls, other_arguments, other_weights, written_over]
)
def test_what_a_function_does_besides_is_never_taken_for_the_same(loss: Any):
    model = Counting()
    values, _ = found(model, loss)
    assert values == found(model, loss, apart)[0]
    assert values == pytest.approx(expected(model, loss), rel=1e-6)


def test_a_model_that_draws_random_numbers_is_run_for_each():
    model = Counting()
    model.noise = 0.1
    assert found(model, plain)[1] == 12


def test_an_output_that_is_written_over_late_is_not_used():
    model, calls = Counting(), []

    def late(given: Any, batch: Any) -> torch.Tensor:
        calls.append(1)
        return (written_over if len(calls) > 3 else plain)(given, batch)

    values, runs = found(model, late)
    # Two for each micro-batch of the first batch, and of the three whose output was written over.
    assert runs == 4 + 1 + 6
    wanted = expected(model)
    assert [values[name] for name in METRICS] == pytest.approx([wanted[name] for name in METRICS])


def test_an_objective_that_writes_into_the_output_is_refused_or_its_output_not_used():
    writing = Objective(first, lambda output, batch: cross_entropy(output.mul_(2), batch[1]))
    with pytest.raises(ConfigError, match=r"changes the model's output in place.*inputs function"):
        found(Counting(), writing, SAME)
    model = Counting()
    values, runs = found(model, writing)
    assert runs == 12
    assert values == pytest.approx(expected(model, writing), rel=1e-6)


@pytest.mark.parametrize("loss", [plain, OBJECTIVE], ids=["function", "objective"])
def test_nothing_is_read_on_the_host_before_the_end(loss: Any, monkeypatch: pytest.MonkeyPatch):
    model = Counting()
    reads = []

    def noted(name: str) -> None:
        before = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, *args: (reads.append(name), before(self, *args))[1]
        )

    def given() -> Iterator[Batch]:
        yield from batches()
        # What is read from here on is read once all batches are evaluated.
        assert not reads

    for name in ("item", "tolist", "__float__", "__int__", "__bool__", "numpy", "cpu"):
        noted(name)
    engine = StepEngine(EngineSpec(model), WORLD, model)
    evaluate(engine, given(), loss, WORLD, metrics=METRICS)
    engine.close()
    assert reads == ["tolist"]
