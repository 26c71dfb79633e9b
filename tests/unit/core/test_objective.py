"""A loss in its parts: what goes into the model, what is made of its output, and how many items."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from unipar import LossSum, Objective, Session
from unipar.data.batch import Batch, MicroBatch
from unipar.errors import ConfigError
from unipar.objective import require_objective

LABELS = torch.tensor([[1, 2, -100], [3, 4, 5]])


class Outputs:
    """Records what it is called with, and returns an output with a loss of 2."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.args, self.kwargs = args, kwargs
        return SimpleNamespace(loss=torch.tensor(2.0))


class Pair(NamedTuple):
    x: Any
    y: Any


def own(output: Any, batch: Any) -> torch.Tensor:
    return output.loss


def called_with(given: Any) -> Outputs:
    model = Outputs()
    assert float(Objective(lambda batch: given, own)(model, None)) == 2.0
    return model


# -- what goes into the model --------------------------------------------------------------------


def test_inputs_are_keyword_arguments_positional_ones_or_one_tensor():
    x, y = torch.zeros(2), torch.ones(2)
    assert called_with({"a": x}).kwargs == {"a": x}
    assert called_with((x, y)).args == (x, y)
    assert called_with(x).args[0] is x
    assert called_with(({"a": x},)).args == ({"a": x},)
    assert called_with(()).args == ()


@pytest.mark.parametrize("given", [[1, 2], Pair(1, 2), 3, None, {1: 2}], ids=repr)
def test_what_could_be_read_in_two_ways_is_refused(given: Any):
    with pytest.raises(ConfigError, match=r"Return a mapping .* or one tensor; .* tuple: \(x,\)"):
        called_with(given)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((3, own), "inputs is a int. Pass a function inputs"),
        ((lambda model, batch: model, own), "is called as inputs"),
        (
            (len, nn.CrossEntropyLoss()),
            r"loss is a CrossEntropyLoss.* module\(output, batch\[1\]\)",
        ),
        ((len, lambda output: output), "is called as loss"),
        ((len, own, 5), "num_items is a int"),
    ],
)
def test_parts_that_cannot_be_called_are_refused_where_they_are_written(parts: Any, said: str):
    with pytest.raises(ConfigError, match=said):
        Objective(*parts)


# -- what is made of the output ------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 3.0, torch.tensor(3)], ids=repr)
def test_num_items_says_how_many_items_the_mean_is_over(count: Any):
    loss = Objective(dict, own, lambda batch: count)(Outputs(), {})
    assert isinstance(loss, LossSum)
    assert (float(loss.total), loss.count) == (6.0, 3.0)


@pytest.mark.parametrize("count", [-1, float("nan"), float("inf"), "3", torch.ones(2)], ids=repr)
def test_what_is_no_count_is_refused(count: Any):
    with pytest.raises(ConfigError, match=r"num_items\(batch\) gave"):
        Objective(dict, own, lambda batch: count)(Outputs(), {})


def test_a_count_is_given_once():
    with pytest.raises(ConfigError, match="Leave num_items out, or return the mean"):
        Objective(dict, lambda output, batch: LossSum(output.loss, 2), len)(Outputs(), {})


def mean_of_kept(output: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return (output.square() * kept).sum() / kept.sum()


def test_a_batch_without_items_counts_nothing_and_neither_does_its_gradient():
    """Its mean is not a number, and here its gradient is none either."""
    model, kept = nn.Linear(2, 2), torch.zeros(3, 2)
    mean = mean_of_kept(model(torch.ones(3, 2)), kept)
    mean.backward()
    assert model.weight.grad is not None
    assert model.weight.grad.isnan().all()
    model.weight.grad = None
    objective = Objective(lambda batch: torch.ones(3, 2), mean_of_kept, torch.sum)
    loss = objective(model, kept)
    assert (loss.total.item(), loss.count) == (0.0, 0.0)
    loss.total.backward()
    assert model.weight.grad is not None
    assert model.weight.grad.abs().max() == 0


def test_items_are_counted_on_the_host():
    """Before the batch moves to the device, so that no step waits for the device to say."""
    batch = {"x": torch.ones(2, 3)}
    counted: list[Any] = []

    def count(given: Any) -> int:
        counted.append(given)
        return 2

    objective = Objective(
        lambda given: given["x"], lambda output, batch: output.mean(), count
    ).counted(batch)
    loss = objective(nn.Linear(3, 1), {"x": torch.ones(2, 3)})
    assert isinstance(loss, LossSum)
    assert loss.count == 2
    assert counted == [batch]


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def test_an_engine_takes_it_as_a_loss_function():
    with Session("single", device="cpu") as session:
        engine = session.prepare(nn.Linear(2, 1), optimizer=sgd)
        parts = [MicroBatch((torch.ones(n, 2), torch.ones(n)), n) for n in (3, 1)]
        counted: list[Any] = []

        def count(batch: Any) -> int:
            counted.append(batch)
            return len(batch[1])

        objective = Objective(lambda batch: batch[0], lambda output, _: output.mean(), count)
        step = engine.train_step(Batch(tuple(parts), 4), objective)
        assert step.num_items == 4
        # The batches themselves, not what moving them to the device would make of them.
        assert all(one is part.data for one, part in zip(counted, parts, strict=True))
        assert engine.eval_batch(Batch((parts[0],), 3), objective).count == 3


# -- models that compute their own loss ----------------------------------------------------------


class TinyForCausalLM(Outputs): ...


class Renamed(Outputs):
    config = SimpleNamespace(architectures=["GPT2LMHeadModel"])


class Plain(Outputs):
    config = SimpleNamespace(architectures=None)


class Typed(Outputs):
    loss_type = "ForConditionalGeneration"


class TwoParts(Typed):
    config = SimpleNamespace(is_encoder_decoder=True)


class BartForCausalLM(Outputs): ...


class Wrapper(Outputs):
    """As DistributedDataParallel: the class that tells is inside."""

    module = TinyForCausalLM()


def of_model(model: Any, batch: Any) -> Any:
    return Objective.of_model(model)(model, batch)


def test_a_batch_is_passed_as_its_kind_says():
    model = Outputs()
    x = torch.zeros(2)
    of_model(model, {"a": x})
    assert (model.args, list(model.kwargs)) == ((), ["a"])
    of_model(model, [x, x])
    assert len(model.args) == 2
    of_model(model, x)
    assert model.args[0] is x


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (Plain(), 5),
        (TwoParts(), 5),
        (BartForCausalLM(), 5),
        (TinyForCausalLM(), 3),
        (Renamed(), 3),
        (Typed(), 3),
        (Wrapper(), 3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_mean_is_weighted_by_the_labels_that_it_is_a_mean_of(model: Outputs, count: int):
    """A causal model predicts the second and third label of each row; one is left out."""
    loss = of_model(model, {"labels": LABELS})
    assert isinstance(loss, LossSum)
    assert (float(loss.total), loss.count) == (2.0 * count, count)


def test_labels_that_are_shifted_already_are_counted_as_they_are():
    loss = of_model(TinyForCausalLM(), {"labels": LABELS, "shift_labels": LABELS})
    assert loss.count == 5


def test_classes_of_samples_are_left_out_too():
    assert of_model(Plain(), {"labels": torch.tensor([1, -100, 0])}).count == 2


class OneForSequenceClassification(Outputs):
    config = SimpleNamespace(num_labels=1)


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (Plain(), {"labels": torch.zeros(2, 3)}),
        (Plain(), {}),
        (Plain(), (LABELS,)),
        (OneForSequenceClassification(), {"labels": torch.tensor([-100, 3])}),
    ],
    ids=["numbers", "none", "positional", "whole numbers"],
)
def test_other_losses_are_means_over_samples(model: Any, batch: Any):
    assert isinstance(of_model(model, batch), torch.Tensor)


def test_a_mapping_as_output_has_its_loss_too():
    loss = torch.tensor(3.0)
    assert of_model(lambda **_: {"loss": loss}, {}) is loss


def test_an_output_without_a_loss_is_refused():
    with pytest.raises(ConfigError, match=r"output \(Tensor\) has no `.loss`. Pass loss=f"):
        of_model(nn.Linear(2, 2), torch.zeros(1, 2))


class PassingOn(nn.Module):
    """As DistributedDataParallel: takes anything, and hands it on."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    ("batch", "call"),
    [
        ((torch.zeros(2, 4), torch.zeros(2, 1)), "model(Tensor, Tensor)"),
        ({"x": torch.zeros(2, 4), "y": 1}, "model(x=Tensor, y=int)"),
    ],
    ids=["pair", "mapping"],
)
def test_a_batch_that_the_model_does_not_take_is_a_loss_left_out(
    batch: Any, call: str, wrapped: bool
):
    model = PassingOn(nn.Linear(4, 1)) if wrapped else nn.Linear(4, 1)
    with pytest.raises(ConfigError, match="no loss was given") as caught:
        of_model(model, batch)
    message = str(caught.value)
    assert f"{call}, which its forward does not take: Linear.forward() " in message
    assert "left out only for a model whose output has `.loss`" in message
    assert "Pass loss=f with f(model, batch)" in message
    assert isinstance(caught.value.__cause__, TypeError)


class Buggy(nn.Module):
    """Takes the batch, and calls a layer of its own wrongly."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.layer(x, y)


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_error_within_a_model_is_shown_as_it_is(wrapped: bool):
    batch = (torch.zeros(2, 4), torch.zeros(2, 1))
    model = PassingOn(Buggy()) if wrapped else Buggy()
    with pytest.raises(TypeError, match=r"^Linear.forward\(\) takes 2 positional"):
        of_model(model, batch)
    # Not even where a hook makes arguments of the batch that the batch itself is not.
    model = Buggy()
    model.register_forward_pre_hook(lambda _, given: (given[0], given[0]))
    with pytest.raises(TypeError, match=r"^Linear.forward\(\) takes 2 positional"):
        of_model(model, (*batch, batch))


def test_an_objective_of_the_user_is_called_as_it_says():
    objective = Objective(lambda batch: batch, own)
    with pytest.raises(TypeError, match=r"^Linear.forward\(\) takes 2 positional"):
        objective(nn.Linear(4, 1), (torch.zeros(2, 4), torch.zeros(2, 1)))


def test_what_a_pipeline_cannot_take_apart_is_refused_with_what_to_write():
    with pytest.raises(ConfigError, match=r"loss=unipar.Objective\(inputs=lambda batch"):
        require_objective(lambda model, batch: model(batch))


class LlamaForCausalLM(nn.Module):
    """By its name, one that predicts a label from the tokens before it."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(is_encoder_decoder=False, architectures=None)
        self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 2)


class PeftModelForCausalLM(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def get_base_model(self) -> nn.Module:
        return self.base


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class TinyAround(nn.Module):
    """The user's own of that name, around what computes its hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.body = LlamaForCausalLM()


TinyAround.__name__ = "MineForCausalLM"


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (LlamaForCausalLM(), 3),
        (Around(LlamaForCausalLM()), 3),
        (PeftModelForCausalLM(LlamaForCausalLM()), 3),
        (torch.compile(Around(LlamaForCausalLM())), 3),
        (nn.ModuleList([LlamaForCausalLM()]), 3),
        (TinyAround(), 3),
        (Around(nn.Linear(2, 2)), 5),
    ],
    ids=["alone", "around", "peft", "compiled", "stages", "own name", "another"],
)
def test_what_is_around_a_model_does_not_hide_what_it_is(model: Any, count: int) -> None:
    assert Objective.of_model(model).count({"labels": LABELS}) == count
