"""An instance that computes by another forward for a while has its own again afterwards."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from unipar import Session
from unipar.engine import replace_forward

TWO = torch.full((), 2.0)


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_forwards_are_given_back_in_any_order(order: tuple[int, ...], patched: bool) -> None:
    module = Doubling()
    if patched:
        module.forward = lambda x: 3 * x
    own = vars(module).get("forward")
    undo = []
    for _ in range(3):
        undo.append(replace_forward(module, lambda x, before=module.forward: before(x) + 1))
    assert module(TWO).item() == (9 if patched else 7)
    for index in order:
        undo[index]()
        undo[index]()
    assert vars(module).get("forward") is own
    assert module(TWO).item() == (6 if patched else 4)


def test_what_a_user_puts_over_it_stays() -> None:
    module = Doubling()
    undo = replace_forward(module, lambda x: 5 * x)
    module.forward = lambda x: 7 * x
    undo()
    assert module(TWO).item() == 14


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.5)


@pytest.mark.parametrize(
    "setting", [{"activation_offload": True}, {"activation_checkpointing": ("Linear",)}]
)
@pytest.mark.parametrize("first", ["a", "b"])
def test_engines_that_share_a_patched_model_leave_it_as_it_was(
    setting: dict[str, Any], first: str
) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in net.modules():
        module.forward = lambda x, own=module.forward: 3 * own(x)
    own = [vars(module)["forward"] for module in net.modules()]
    with Session("single", device="cpu") as session:
        for name in "ab":
            session.prepare(net, optimizer=sgd, name=name, **setting)
        session.release(first)
    assert [vars(module)["forward"] for module in net.modules()] == own


def test_a_block_that_has_a_forward_of_its_own_keeps_it() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    inputs = torch.ones(2, 4)
    for block in net:
        block.forward = lambda x, own=block.forward: 3 * own(x)
    before = net(inputs)
    with Session("single", device="cpu") as session:
        session.prepare(net, optimizer=sgd, activation_checkpointing=("Linear",))
    torch.testing.assert_close(net(inputs), before)
