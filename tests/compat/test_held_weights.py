"""Weights that a script has taken from its model, and changes as PyTorch lets it.

Each is held against plain PyTorch on one process, which has the samples of both ranks.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain_scripts import plainly
from torch import nn

from unipar.compat.adopting import adoption
from unipar.compat.native.wrappers import DistributedDataParallel
from unipar.compat.run import current

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DATA = torch.randn(5, 2, 4, 4, generator=torch.Generator().manual_seed(0))
"""Of each step and rank four samples."""
Act = Callable[[int, nn.Module, list[nn.Parameter], torch.optim.Optimizer], None]
"""Takes the number of a step, the model, its parameters from before the first, what trains it."""


class Net(nn.Sequential):
    """Ranks have different numbers of rows of each weight, and one has none of the last bias."""

    def __init__(self, width: int = 5) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.scale


def train(model: Any, wrapped: Any, shares: torch.Tensor, act: Act) -> list[list[float]]:
    """What it computes of the same samples after each step, and what was done then."""
    held = list(model.parameters())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    vars(optimizer)["buffers"] = list(model.buffers())
    found = []
    for number, samples in enumerate(shares):
        optimizer.zero_grad()
        (wrapped(samples) - 1).square().mean().backward()
        optimizer.step()
        act(number, model, held, optimizer)
        with torch.no_grad():
            found.append(wrapped(DATA[0, 0]).flatten().tolist())
    return found


def alone(act: Act, width: int = 5) -> list[list[float]]:
    model = Net(width)
    return train(model, model, DATA.flatten(1, 2), act)


def by_ddp(act: Act) -> Any:
    adoption.note_aware()
    model = Net()
    return train(model, DistributedDataParallel(model), DATA[:, current.placement().rank], act)


def clamped(number: int, model: Any, held: Any, optimizer: Any) -> None:
    with torch.no_grad():
        for one in held:
            one.clamp_(-0.3, 0.3)


def shrunk(number: int, model: Any, held: Any, optimizer: Any) -> None:
    with torch.no_grad():
        torch._foreach_mul_(held, 0.9)  # pyright: ignore[reportPrivateImportUsage]


def averaged(number: int, model: Any, held: Any, optimizer: Any) -> None:
    """By an average that is kept where the script keeps it, and taken up in the end."""
    own = vars(optimizer).setdefault("average", [one.detach().clone() for one in held])
    with torch.no_grad():
        for average, one in zip(own, held, strict=True):
            average.lerp_(one, 0.5)
            if number == 3:
                one.copy_(average)


def frozen(number: int, model: Any, held: Any, optimizer: Any) -> None:
    for one in held[:2]:
        one.requires_grad = number % 2 == 1


def regrouped(number: int, model: Any, held: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"] = held[2:] if number == 0 else held


def redrawn(number: int, model: Any, held: Any, optimizer: Any) -> None:
    nn.init.constant_(held[number % 4], 0.1)


def copied(number: int, model: Any, held: Any, optimizer: Any) -> None:
    copies = copy.deepcopy(held)
    torch.save(held, io.BytesIO())
    with torch.no_grad():
        for one, other in zip(held, copies, strict=True):
            one.sub_(other, alpha=0.1)


def noted(number: int, model: Any, held: Any, optimizer: Any) -> None:
    held[0].factor = 0.5
    with torch.no_grad():
        for one in model.parameters():
            one.mul_(getattr(one, "factor", 1.0))


def clipped(number: int, model: Any, held: Any, optimizer: Any) -> None:
    """As the critic of a WGAN is."""
    for one in model.parameters() if number % 2 else held:
        one.data = one.data.clamp(-0.3, 0.3)


def lent(number: int, model: Any, held: Any, optimizer: Any) -> None:
    """An average takes the places of weights, which come back; each keeps its own memory."""
    named, kept = dict(model.named_parameters()), {}
    own = vars(optimizer).setdefault("own", {n: p.data.clone() for n, p in named.items()})
    for name, one in named.items():
        own[name] = 0.5 * own[name] + 0.5 * one.data
        kept[name], one.data = one.data, own[name]
    for name, one in named.items() if number != 2 else ():
        one.data = kept[name]


def shared(number: int, model: Any, held: Any, optimizer: Any) -> None:
    """What is given is changed afterwards."""
    given = [one.data * 0.9 for one in held]
    for one, other in zip(held, given, strict=True):
        one.data = other
    for other in given:
        other.mul_(0.9)


def buffered(number: int, model: Any, held: Any, optimizer: Any) -> None:
    (own,) = vars(optimizer)["buffers"]
    own.mul_(0.9)
    model.scale.add_(0.01)


ACTS = [clamped, shrunk, averaged, frozen, regrouped, redrawn, copied, noted]
DATAS = [clipped, lent, shared]


@pytest.mark.parametrize("act", [*ACTS, *DATAS, buffered])
def test_what_is_done_to_weights_is_done_to_the_model(world_pool: Any, act: Act) -> None:
    expected = alone(act)
    for found in world_pool(2).run(plainly, "fsdp", by_ddp, act):
        assert isinstance(found, tuple), found
        torch.testing.assert_close(found[0], expected)


VARIANTS = [f"fsdp:{how}" for how in ("keep_root=true", "sharding=hybrid", "cpu_offload=true")]


@pytest.mark.parametrize("strategy", VARIANTS)
@pytest.mark.parametrize("act", [clamped, *DATAS])
def test_however_they_are_divided(world_pool: Any, strategy: str, act: Act) -> None:
    expected = alone(act)
    for found in world_pool(2).run(plainly, strategy, by_ddp, act):
        assert isinstance(found, tuple), found
        torch.testing.assert_close(found[0], expected)


@pytest.mark.parametrize("act", [clamped, clipped, lent, regrouped])
def test_layers_that_ranks_divide_are_changed_so_too(world_pool: Any, act: Act) -> None:
    expected = alone(act, 6)
    strategy = "mesh:tp=2,plan={'0':'colwise','2':'rowwise'}"
    for found in world_pool(2).run(plainly, strategy, alone, act, 6):
        assert isinstance(found, tuple), found
        torch.testing.assert_close(found[0], expected)


def functional(number: int, model: Any, held: Any, optimizer: Any) -> None:
    weights = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    with torch.no_grad():
        torch.func.functional_call(model, weights, (DATA[0, 0],))


def assigned(number: int, model: Any, held: Any, optimizer: Any) -> None:
    model[0].weight = nn.Parameter(torch.ones(5, 4))


def taken_away(number: int, model: Any, held: Any, optimizer: Any) -> None:
    model[0].bias = None


def given_whole(number: int, model: Any, held: Any, optimizer: Any) -> None:
    total = sum(p.numel() for p in held)
    nn.utils.vector_to_parameters(torch.ones(total), model.parameters())


def given_another(number: int, model: Any, held: Any, optimizer: Any) -> None:
    held[0].data = held[0].data.double()


def hooked(number: int, model: Any, held: Any, optimizer: Any) -> None:
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))


def hooked_by_held(number: int, model: Any, held: Any, optimizer: Any) -> None:
    held[0].register_post_accumulate_grad_hook(lambda parameter: None)


def differentiated(number: int, model: Any, held: Any, optimizer: Any) -> None:
    torch.autograd.grad(model(DATA[0, 0]).sum(), held)


def penalized(number: int, model: Any, held: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    (model(DATA[0, 0]).sum() + sum(one.square().sum() for one in held)).backward()


def read(number: int, model: Any, held: Any, optimizer: Any) -> None:
    held[0].norm().item()


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (functional, ["0.weight, 0.bias, 2.weight, 2.bias of the model: something else", "as ddp"]),
        (assigned, ["0.weight of the model: something else has the place of the parameter"]),
        (taken_away, ["0.bias of the model: something else has the place of the parameter"]),
        (given_whole, ["parameter.data of '0.weight' was given a whole tensor", "as ddp"]),
        (given_another, ["parameter.data of '0.weight' was given a DTensor of another layout"]),
        (hooked, ["0.weight of the model: a hook was put on the gradient", "strategy='ddp'"]),
        (hooked_by_held, ["0.weight of the model: a hook was put on the gradient"]),
        (differentiated, ["torch.autograd.grad was asked for the gradient of parameter '0"]),
        (penalized, ["the loss is a DTensor"]),
        (read, ["a number was read", "full_tensor()"]),
    ],
)
def test_what_would_be_lost_is_refused(world_pool: Any, act: Act, says: list[str]) -> None:
    for said in world_pool(2).run(plainly, "fsdp", by_ddp, act):
        for part in says:
            assert part in said


def test_weights_that_are_not_the_models_are_refused_under_zero3_too(world_pool: Any) -> None:
    for said in world_pool(2).run(plainly, "zero3", by_ddp, functional):
        assert "0.weight, 0.bias, 2.weight, 2.bias of the model: something else" in said


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_hooks_that_are_called_are_left(world_pool: Any, strategy: str) -> None:
    expected = alone(scaled)
    for found in world_pool(2).run(plainly, strategy, by_ddp, scaled):
        assert isinstance(found, tuple), found
        torch.testing.assert_close(found[0], expected)


def scaled(number: int, model: Any, held: Any, optimizer: Any) -> None:
    if number == 0:
        model[0].weight.register_hook(lambda gradient: gradient * 0.5)
