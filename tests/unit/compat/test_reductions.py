"""What a loss of a part of a batch counts for is read from its graph, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from unipar.compat.graph_nodes import couples_inside
from unipar.compat.models import _LEADS_TO
from unipar.compat.reductions import Weight, note_share, weight_of
from unipar.errors import ConfigError

SHARE = (3, 8)
MEAN, SUM = 3 * 2 / 8, 2
LABELS = torch.tensor([0, 1, 2])
WEIGHT = nn.Parameter(torch.randn(5, 4))
TASKS = nn.Parameter(torch.zeros(2))


def weight(loss: Tensor) -> Weight:
    found = weight_of(loss, 2, None)
    assert found is not None
    return found


def output(share: tuple[int, int] | None = SHARE, samples: int = 3) -> Tensor:
    made = torch.randn(samples, 5) @ WEIGHT
    return marked(made, share)


def marked(made: Tensor, share: tuple[int, int] | None) -> Tensor:
    node: Any = made.grad_fn
    node.metadata[_LEADS_TO] = ()
    note_share(made, share)
    return made


@pytest.mark.parametrize(
    ("loss", "factor"),
    [
        (lambda x: x.mean(), MEAN),
        (lambda x: x.sum(1).mean(), MEAN),
        (lambda x: 0.5 * x.mean() - x.pow(2).mean() / 4, MEAN),
        (lambda x: torch.stack([x.mean(), x.abs().mean()]).sum(), MEAN),
        (lambda x: functional.cross_entropy(x, LABELS, label_smoothing=0.1) / 2, MEAN),
        (lambda x: x.abs().sum() / len(x), MEAN),
        (lambda x: x.mean() + 0.1 * WEIGHT.abs().sum(), MEAN),
        (lambda x: x.mean() * WEIGHT.norm(), MEAN),
        (lambda x: (torch.stack([x.mean(), x.abs().mean()]) * TASKS.exp() + TASKS).sum(), MEAN),
        (lambda x: (torch.stack([x.mean(), x.abs().mean()]) * TASKS.exp()).sum() / 2, MEAN),
        (lambda x: (x.mean() * TASKS.exp()).mean() + TASKS.sum(), MEAN),
        (lambda x: (torch.stack([x.sum(), x.abs().sum()]) * TASKS).sum(), SUM),
        (lambda x: (x * TASKS.exp().sum()).sum(), SUM),
        (lambda x: x.mean() * (1 / 3), MEAN),
        (lambda x: x.abs().mean(0).sum(), MEAN),
        (lambda x: (x.sum(0) * 2).mean(), SUM),
        (lambda x: x.sum() * 0.01, SUM),
        (lambda x: functional.mse_loss(x, x.detach() + 1, reduction="sum").mean(), SUM),
    ],
)
def test_means_count_by_samples_and_sums_as_they_are(
    loss: Callable[[Tensor], Tensor], factor: float
) -> None:
    assert weight(loss(output())).factor == factor


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda x: x.sum() / 7, "divided afterwards"),
        (lambda x: x.sum() + x.mean(), "added to a mean"),
        (lambda x: x.sum() + WEIGHT.pow(2).sum(), "the same for every sample"),
        # An activation that the model has kept, and not given.
        (lambda x: x.mean() + (torch.randn(3, 5) @ WEIGHT).abs().sum(), "added to a mean"),
        (lambda x: x.pow(2).mean().sqrt(), "comes to one number by SqrtBackward"),
        (lambda x: torch.stack([x.mean(), x.abs().mean()]).square().sum(), "number by PowBackward"),
        (lambda x: (torch.stack([x.sum(), x.abs().sum()]) + TASKS).sum(), "is the same for every"),
        (lambda x: x.mean() * x.abs().mean(), "comes to one number by MulBackward"),
        (lambda x: x.max(), "comes to one number by MaxBackward"),
        (lambda x: x.mean() * len(x), "multiplied by 3, the number of samples"),
        (lambda x: x.sum() * (1.0 / len(x)), "by 0.3333, and this rank has 3 samples"),
        (lambda x: x.std(0).mean(), "compares the samples of a batch"),
        (lambda x: x.sum(1).topk(2)[0].mean(), "compares the samples of a batch"),
        (lambda x: x.mean(0).square().sum(), "comes to one number by PowBackward"),
        # Of as many features as samples, it cannot be told which of them is along a dimension.
        (lambda x: x[:, :3].mean(0).sum(), "compares the samples of a batch"),
        (
            lambda x: functional.cross_entropy(x @ x.t(), torch.arange(3)),
            "compares the samples of a batch",
        ),
    ],
)
def test_what_a_part_does_not_tell_is_refused(loss: Callable[[Tensor], Tensor], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        weight(loss(output()))


def test_a_loss_of_several_batches_counts_only_if_they_are_cut_alike() -> None:
    first, ragged = output(), output((1, 5), 1)
    assert weight(first.mean() + output((6, 16), 6).mean()).factor == MEAN
    with pytest.raises(ConfigError, match="in other proportions"):
        weight(first.mean() + ragged.mean())
    assert weight(first.sum() + ragged.sum()).factor == SUM


@pytest.mark.parametrize(
    ("loss", "factor"),
    [
        (lambda x: x.pow(2).sum(), SUM),
        (lambda x: x.pow(2).mean() + WEIGHT.norm(), MEAN),
        (lambda x: (torch.stack([x.mean(), x.abs().mean()]) * TASKS.exp() + TASKS).sum(), MEAN),
    ],
)
def test_a_loss_that_a_model_computes_is_read_inside_of_it(
    loss: Callable[[Tensor], Tensor], factor: float
) -> None:
    inside = torch.randn(3, 5) @ WEIGHT
    assert weight(marked(loss(inside), SHARE)).factor == factor


MASK = torch.tensor([True, False, True])
CLASSES = torch.tensor([1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize(
    ("loss", "counts", "plain"),
    [
        (lambda x: functional.cross_entropy(x, torch.tensor([0, -100, 2])), [2], False),
        (lambda x: functional.cross_entropy(x, LABELS, weight=CLASSES), [6], False),
        (lambda x: (x.sum(1) * MASK).sum() / MASK.sum(), [2], False),
        (lambda x: (x.sum(1) * MASK).sum() / MASK.sum().clamp(min=1), [2], False),
        (lambda x: x.sum(1)[MASK].mean(), [2], False),
        (lambda x: functional.mse_loss(x[MASK], torch.zeros_like(x[MASK])), [8], False),
        (lambda x: functional.cross_entropy(x, LABELS) + x.mean(), [3], True),
        (lambda x: x[:, 0].mean(), [], True),
        (lambda x: x.sum() / len(x), [], True),
        (lambda x: functional.cross_entropy(x, LABELS, reduction="sum") / len(x), [], True),
        (lambda x: (x.sum(1) * MASK).sum() * (1 / MASK.sum()), [2], False),
    ],
)
def test_means_over_some_count_by_these(
    loss: Callable[[Tensor], Tensor], counts: list[float], plain: bool
) -> None:
    found = weight(loss(output()))
    assert [float(one) for one in found.counts] == counts
    assert found.plain is plain


def test_what_a_model_compares_inside_is_found() -> None:
    x, linear, square = torch.randn(3, 5), nn.Linear(5, 3), nn.Linear(3, 3, bias=False)
    assert couples_inside(linear(x) @ linear(x).t(), 3) == "Mm"
    assert couples_inside(linear(x) - linear(x).mean(0), 3) == "Mean"
    assert couples_inside(square(linear(x).tanh()), 3) == ""
