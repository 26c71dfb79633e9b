"""Values that are computed one tensor at a time are those that the model's function describes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from unipar.errors import ConfigError
from unipar.strategy.initial import named_tensors
from unipar.utils.deferred import DeferredModel

WIDTH = 24


class Block(nn.Module):
    def __init__(self, change: Callable[[torch.Tensor], Any] = nn.init.normal_) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2)
        self.norm = nn.BatchNorm1d(WIDTH)
        change(self.linear.weight)


class Steady(nn.Module):
    """All that it computes is certain, by every way of computing it that models have."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH, padding_idx=1)
        with torch.no_grad():
            self.table.weight.copy_(torch.arange(7 * WIDTH).view(7, WIDTH).sin())
            self.table.weight[1].fill_(3)
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.table.weight
        rates = 1 / 10000 ** (torch.arange(0, WIDTH, 2).float() / WIDTH)
        self.register_buffer("rates", rates, persistent=False)
        self.register_buffer("listed", torch.tensor([0.5, 2.0, 7.0]))
        self.register_buffer("mixed", torch.tensor([0.5, 2.0, 7.0]) * rates[:3])
        self.register_buffer("arrived", torch.from_numpy(np.arange(3.0)).float())
        self.small = nn.Parameter(torch.eye(5).bfloat16() / 3)
        self.first, self.second = (nn.Parameter(p) for p in torch.linspace(0, 1, 6).split(3))
        self.mask = torch.tril(torch.ones(3, 3))
        self.many = [torch.arange(3), {"deep": torch.arange(2)}]
        chances = [x.item() for x in torch.linspace(0, 0.5, 3)]
        self.chances = nn.Parameter(torch.tensor(chances + torch.linspace(0, 1, 3).tolist()))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.norm.weight.data.mul_(1 / math.sqrt(3)).add_(1)
        self.again = copy.deepcopy(self.norm)
        self.turned = nn.Parameter(self.norm.weight.detach().expand(3, WIDTH).t().clone())
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        self.wide = nn.Parameter(torch.ones(3))
        torch.set_default_dtype(dtype)


def linear() -> nn.Linear:
    """One whose weight holds other numbers on each side of its diagonal."""
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(16).view(4, 4))
    return layer


def halved_data(layer: nn.Linear) -> None:
    for parameter in layer.parameters():
        parameter.data = parameter.data * 0.5


def product_of_itself(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.data = layer.weight * 0.5


def halved_after_a_cast(layer: nn.Linear) -> None:
    halved_data(layer.bfloat16())


def swapped(layer: nn.Linear) -> None:
    other = nn.Linear(4, 4)
    with torch.no_grad():
        other.weight.copy_(layer.weight * 3)
    torch.utils.swap_tensors(layer.weight, other.weight)


def turned_in_place(layer: nn.Linear) -> None:
    weight = torch.arange(16.0).view(1, 4, 4)
    layer.weight = nn.Parameter(weight.squeeze_(0).t_())


def conjugates(layer: nn.Linear) -> None:
    angles = torch.polar(torch.ones(4), torch.arange(4.0)).conj()
    layer.register_buffer("angles", angles)
    layer.register_buffer("negatives", angles.imag)


@pytest.mark.parametrize(
    "change",
    [
        *(halved_data, product_of_itself, halved_after_a_cast),
        *(swapped, turned_in_place, conjugates),
    ],
)
def test_tensors_that_change_their_memory_keep_what_was_computed_of_them(
    change: Callable[[nn.Linear], None],
) -> None:
    def build() -> nn.Module:
        layer = linear()
        nn.init.zeros_(layer.bias)
        change(layer)
        return layer

    torch.testing.assert_close(computed(build), named_tensors(build()), rtol=0, atol=0)


class Noisy(nn.Module):
    """It draws what is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))
        self.noise, self.more = torch.randn(8), [torch.randn(8)]


def test_random_attributes_are_the_same_on_every_rank() -> None:
    found: list[Any] = []
    for ambient in (1, 2):
        deferred = DeferredModel(Noisy, 0)
        torch.manual_seed(ambient)
        deferred.compute_attributes()
        found.append(deferred.module)
    assert torch.equal(found[0].noise, found[1].noise)
    assert not torch.equal(found[0].noise, found[0].more[0])


def computed(build: Callable[[], nn.Module], seed: int = 0) -> dict[str, torch.Tensor]:
    deferred = DeferredModel(build, seed)
    names = named_tensors(deferred.module)
    deferred.check(names)
    return {name: deferred.compute(name) for name in names}


def test_what_is_certain_is_equal_bit_for_bit() -> None:
    wanted = Steady()
    torch.testing.assert_close(computed(Steady), named_tensors(wanted), rtol=0, atol=0)
    deferred = DeferredModel(Steady, 0)
    named = deferred.module.named_parameters()
    assert [name for name, tensor in named if not tensor.is_meta] == ["chances"]
    assert deferred.module.get_parameter("head.weight") is deferred.module.get_parameter(
        "table.weight"
    )
    deferred.compute_attributes()
    assert torch.equal(deferred.module.mask, wanted.mask)  # pyright: ignore
    assert torch.equal(deferred.module.many[1]["deep"], torch.arange(2))  # pyright: ignore


INITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "normal": lambda w: nn.init.normal_(w, 1.0, 0.02),
    "uniform": lambda w: nn.init.uniform_(w, 2, 3),
    "truncated": lambda w: nn.init.trunc_normal_(w, std=0.02),
    "orthogonal": nn.init.orthogonal_,
    "sparse": lambda w: nn.init.sparse_(w, 0.5),
    "scaled": lambda w: nn.init.xavier_normal_(w).data.mul_(100),
    "drawn aside": lambda w: w.data.copy_(torch.rand(WIDTH, WIDTH) + 5),
}


@pytest.mark.parametrize("change", INITS.values(), ids=INITS.keys())
def test_random_values_are_of_the_distribution_that_the_function_names(
    change: Callable[[torch.Tensor], Any],
) -> None:
    torch.manual_seed(0)
    wanted = Block(change).linear.weight.detach()
    found = computed(lambda: Block(change))["linear.weight"]
    assert not torch.equal(found, wanted)
    for quantity in (torch.mean, torch.std):
        spread = wanted.std() / 4
        torch.testing.assert_close(quantity(found), quantity(wanted), rtol=0.1, atol=float(spread))
    assert (found == 0).sum() == (wanted == 0).sum()


def test_values_depend_on_the_seed_and_the_name_alone() -> None:
    whole = computed(lambda: nn.ModuleDict({"a": Block(), "b": Block()}), 3)
    part = computed(lambda: nn.ModuleDict({"b": Block()}), 3)
    deferred = DeferredModel(lambda: nn.ModuleDict({"a": Block(), "b": Block()}), 3)
    for name in reversed(part):
        assert torch.equal(part[name], whole[name])
        assert torch.equal(deferred.compute(name), whole[name])
    assert not torch.equal(whole["a.linear.weight"], whole["b.linear.weight"])
    assert not torch.equal(whole["a.linear.weight"], whole["a.attention.in_proj_weight"][:WIDTH])
    other = computed(lambda: nn.ModuleDict({"b": Block()}), 4)
    assert not torch.equal(part["b.linear.weight"], other["b.linear.weight"])


def test_what_is_computed_of_one_tensor_is_equal_in_all() -> None:
    def build() -> nn.Module:
        model = nn.ModuleDict({"student": Block(), "teacher": Block()})
        model["teacher"].load_state_dict(model["student"].state_dict())
        return model

    found = computed(build)
    assert torch.equal(found["student.linear.weight"], found["teacher.linear.weight"])


def test_the_function_draws_from_no_generator() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    computed(Block)
    assert torch.equal(torch.get_rng_state(), before)


class Refused(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        weight = torch.empty(4, 4)
        if how == "own generator":
            weight.normal_(generator=torch.Generator().manual_seed(1))
        elif how == "a value":
            weight = torch.full((4, 4), torch.rand(1).item())
        elif how == "resized":
            weight = weight.normal_().resize_(2, 2)
        self.weight = nn.Parameter(weight)


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ("nothing", ConfigError, "gives weight no values"),
        ("own generator", ConfigError, "from a generator of its own"),
        ("a value", ConfigError, "Let it not ask what random tensors hold"),
        ("resized", ConfigError, "cannot be repeated"),
    ],
)
def test_what_cannot_be_computed_by_itself_is_refused(
    how: str, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        computed(lambda: Refused(how))


def test_a_seed_of_the_functions_own_is_refused_where_it_would_count() -> None:
    def build() -> nn.Module:
        torch.manual_seed(5)
        return nn.BatchNorm1d(2) if steady else nn.Linear(2, 2)

    steady = False
    with pytest.raises(ConfigError, match=r"seeds torch's generator .* weight, bias would not"):
        computed(build)
    steady = True
    computed(build)


def test_what_is_computed_of_a_tensor_made_before_on_meta_is_refused() -> None:
    before = torch.ones(4, device="meta")

    def build() -> nn.Module:
        model = nn.Linear(4, 4)
        model.bias = nn.Parameter(before * 2)
        return model

    with pytest.raises(ConfigError, match="that it has not made"):
        computed(build)


@pytest.mark.parametrize("by_numpy", [False, True])
def test_what_was_computed_of_a_changed_tensor_is_refused(by_numpy: bool) -> None:
    values = np.ones(4, "float32")
    given = torch.from_numpy(values)

    def build() -> nn.Module:
        model = nn.Linear(4, 4)
        model.bias.data.copy_(given)
        if by_numpy:
            values[:] = 2
        else:
            given.add_(1)
        return model

    with pytest.raises(ConfigError, match="changes afterwards"):
        DeferredModel(build, 0).check(["bias"])
