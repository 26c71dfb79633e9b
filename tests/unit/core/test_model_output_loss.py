"""The loss that a model computes itself, weighted by what it is a mean of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from unipar.errors import ConfigError
from unipar.loss import LossSum, check_loss, model_output_loss

LABELS = torch.tensor([[1, 2, -100], [3, 4, 5]])


class Outputs:
    """Records what it is called with, and returns an output with a loss of 2."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.args, self.kwargs = args, kwargs
        return SimpleNamespace(loss=torch.tensor(2.0))


class TinyForCausalLM(Outputs): ...


class Renamed(Outputs):
    config = SimpleNamespace(architectures=["GPT2LMHeadModel"])


class Plain(Outputs):
    config = SimpleNamespace(architectures=None)


class Wrapper(Outputs):
    """As DistributedDataParallel: the class that tells is inside."""

    module = TinyForCausalLM()


def test_a_batch_is_passed_as_its_kind_says():
    model = Outputs()
    x = torch.zeros(2)
    model_output_loss(model, {"a": x})
    assert (model.args, list(model.kwargs)) == ((), ["a"])
    model_output_loss(model, [x, x])
    assert len(model.args) == 2
    model_output_loss(model, x)
    assert model.args[0] is x


@pytest.mark.parametrize(
    ("model", "count"),
    [(Plain(), 5), (TinyForCausalLM(), 3), (Renamed(), 3), (Wrapper(), 3)],
    ids=lambda value: type(value).__name__,
)
def test_a_mean_is_weighted_by_the_labels_that_it_is_a_mean_of(model: Outputs, count: int):
    """A causal model predicts the second and third label of each row; one is left out."""
    loss = model_output_loss(model, {"labels": LABELS})
    assert isinstance(loss, LossSum)
    assert (float(loss.total), int(loss.count)) == (2.0 * count, count)


@pytest.mark.parametrize(
    "batch",
    [{"labels": torch.tensor([1, 0])}, {"labels": torch.zeros(2, 3)}, {}, (LABELS,)],
    ids=["a class for each sample", "regression", "none", "positional"],
)
def test_other_losses_are_means_over_samples(batch: Any):
    assert isinstance(model_output_loss(TinyForCausalLM(), batch), torch.Tensor)


def test_a_batch_without_any_label_counts_nothing():
    """Its mean is not a number, neither may be what training makes of it."""
    logits = torch.randn(2, 3, 5, requires_grad=True)
    labels = torch.full((2, 3), -100)
    mean = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert mean.isnan()
    loss = model_output_loss(lambda **_: {"loss": mean}, {"labels": labels})
    assert isinstance(loss, LossSum)
    assert (float(loss.total), int(loss.count)) == (0.0, 0)
    loss.total.backward()
    assert logits.grad is not None
    assert logits.grad.abs().max() == 0


def test_a_mapping_as_output_has_its_loss_too():
    loss = torch.tensor(3.0)
    assert model_output_loss(lambda **_: {"loss": loss}, {}) is loss


def test_an_output_without_a_loss_is_refused():
    with pytest.raises(ConfigError, match=r"output \(Tensor\) has no `.loss`. Pass loss=f"):
        model_output_loss(nn.Linear(2, 2), torch.zeros(1, 2))


def test_a_sum_is_checked_by_its_total():
    with pytest.raises(ConfigError, match=r"shape \(3,\), and must be a scalar"):
        check_loss(LossSum(torch.zeros(3), 3), training=False)
    with pytest.raises(ConfigError, match="does not require grad"):
        check_loss(LossSum(torch.zeros(()), 3), training=True)
    check_loss(LossSum(torch.zeros(()), 3), training=False)
