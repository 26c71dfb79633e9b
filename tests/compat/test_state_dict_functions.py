"""``torch.distributed.checkpoint.state_dict``'s options, each held against PyTorch's own."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import pytest
import torch
from plain_scripts import batches, plainly
from torch import nn
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.checkpoint.state_dict import StateDictOptions

from unipar.compat.native.calls import load_whole_state_dict, whole_state_dict
from unipar.compat.native.wrappers import DistributedDataParallel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FACE = "unipar.compat.torch.distributed.checkpoint.state_dict"
DIVIDED = [(1, "single"), (2, "ddp"), (2, "zero2"), (2, "fsdp")]


class Tied(nn.Module):
    """Weights of which some are frozen, and one has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        first = nn.Linear(6, 6, bias=False)
        self.adapter = nn.Sequential(first, nn.BatchNorm1d(6))
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.adapter(self.base(x)))


def build() -> tuple[Tied, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Tied()
    trained = [one for one in model.parameters() if one.requires_grad]
    groups = [{"params": trained[:1]}, {"params": trained[1:], "lr": 0.02}]
    return model, torch.optim.AdamW(groups, lr=0.01, eps=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, size: int = 8) -> None:
    (x,) = batches(size)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def numbers(*values: Any) -> list[Any]:
    """All that is in these, in one order."""
    found: list[Any] = []
    for one in values:
        if isinstance(one, dict):
            for key in sorted(one, key=str):
                found += [key, *numbers(one[key])]
        elif isinstance(one, (list, tuple)):
            found += numbers(*one)
        elif isinstance(one, torch.Tensor):
            found += one.double().flatten().tolist()
        else:
            found.append(one if isinstance(one, float) else str(one))
    return found


def kept(module: str, first: int) -> list[Any]:
    """What is got of a model and its optimizer, after some steps or none."""
    states = importlib.import_module(module)
    model, optimizer = build()
    for _ in range(first):
        step(model, optimizer)
    options, parts = StateDictOptions, {model.adapter}
    model_of = partial(states.get_model_state_dict, model)
    return numbers(
        model_of(submodules=parts),
        model_of(submodules=parts, options=options(keep_submodule_prefixes=False)),
        model_of(options=options(ignore_frozen_params=True)),
        states.get_optimizer_state_dict(
            model, optimizer, options=options(flatten_optimizer_state_dict=True)
        ),
        states.get_state_dict(model, optimizer, submodules=parts)[0],
    )


def taken(module: str, first: int) -> list[Any]:
    """Training that goes on with parts of another run's weights, and its optimizer's state."""
    states = importlib.import_module(module)
    stored = {name: one + 0.1 for name, one in build()[0].state_dict().items()}
    known = {name: stored[name] for name in ("head.weight", "adapter.1.bias")}
    model, optimizer = build()
    step(model, optimizer)
    step(model, optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = states.get_optimizer_state_dict(model, optimizer, options=options)
    flat["param_groups.adapter.0.weight.lr"] = 0.5
    flat["state.elsewhere.exp_avg"] = torch.zeros(3)
    model, optimizer = build()
    for _ in range(first):
        step(model, optimizer)
    states.set_optimizer_state_dict(model, optimizer, dict(flat), options=options)
    loose = StateDictOptions(strict=False)
    keys = [
        states.set_model_state_dict(model, {**known, "stray": torch.ones(2)}, options=loose),
        model.load_state_dict({"base.bias": stored["base.bias"]}, strict=False),
        states.set_model_state_dict(
            model, {model.adapter[1]: {"weight": stored["adapter.1.weight"]}}, options=loose
        ),
        model.load_state_dict({**model.state_dict(), "base.bias": torch.ones(6)}),
    ]
    step(model, optimizer)
    # PyTorch counts this one as given where a state dict has no version.
    told = [sorted({*one} - {"adapter.1.num_batches_tracked"}) for pair in keys for one in pair]
    return numbers(told, model.state_dict(), states.get_optimizer_state_dict(model, optimizer))


def hold(pool: Any, strategy: str, act: Any, first: int) -> None:
    expected = act(torchs.__name__, first)
    for one in pool.run(plainly, strategy, partial(act, FACE, first)):
        assert isinstance(one, tuple), one
        assert [str(value) for value in one[0] if not isinstance(value, float)] == [
            str(value) for value in expected if not isinstance(value, float)
        ]
        assert [value for value in one[0] if isinstance(value, float)] == pytest.approx(
            [value for value in expected if isinstance(value, float)], rel=1e-3, abs=1e-4
        )


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize(("size", "strategy"), DIVIDED)
def test_what_is_asked_for_is_got(world_pool: Any, size: int, strategy: str, first: int) -> None:
    hold(world_pool(size), strategy, kept, first)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(("size", "strategy"), DIVIDED)
def test_what_is_given_is_taken(world_pool: Any, size: int, strategy: str, first: int) -> None:
    hold(world_pool(size), strategy, taken, first)


def refused(what: str) -> list[float]:
    states = importlib.import_module(FACE)
    model, optimizer = build()
    step(model, optimizer)
    if what == "none":
        states.set_optimizer_state_dict(model, optimizer, {})
    elif what == "flat of another":
        flat = {"state.elsewhere.exp_avg": torch.zeros(3), "param_groups.elsewhere.lr": 0.1}
        states.set_optimizer_state_dict(model, optimizer, flat)
    else:
        other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        states.get_optimizer_state_dict(model, [optimizer, other])
    return []


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("none", "holds no 'param_groups'"),
        ("flat of another", "has no options of adapter.0.weight"),
        ("several", "the state of 2 optimizers: an engine steps a model by one"),
    ],
)
def test_state_that_would_be_lost_is_refused(world_pool: Any, what: str, said: str) -> None:
    for one in world_pool(2).run(plainly, "ddp", partial(refused, what)):
        assert said in one


def wrapped() -> list[Any]:
    """Weights by the names that those who have the wrapper, what it wraps and a file have."""
    inner = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer)
    states, own = importlib.import_module(FACE), whole_state_dict(model)
    step(model, optimizer)
    load_whole_state_dict(model, own)
    again = whole_state_dict(inner)
    equal = all(torch.equal(one, again[name.removeprefix("module.")]) for name, one in own.items())
    return [[*own], [*again], [*states.get_model_state_dict(model)], equal]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_whole_weights_have_the_names_of_the_state_dict(world_pool: Any, strategy: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    names = [*model.state_dict()]
    outer = [f"module.{name}" for name in names]
    for found, told in world_pool(2).run(plainly, strategy, wrapped):
        assert (found, told) == ([outer, names, names, True], [])
