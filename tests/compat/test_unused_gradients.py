"""Gradients that no rank has are ``None``, for scripts that count those that are there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from faces import under
from plain_scripts import plainly
from torch import nn

from unipar.compat.accelerate import Accelerator
from unipar.compat.accelerate.utils import DistributedDataParallelKwargs
from unipar.compat.adopting import adoption
from unipar.compat.native.wrappers import DistributedDataParallel
from unipar.compat.run import current

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HEADS = [(0, 0), (1, 1), (0, 1), (2, 2), (0, 2)]
"""Of each step what each rank uses."""


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Linear(6, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 1) for _ in range(3)])

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](self.body(x).tanh())


def scale_by_hand(kind: str, passes: int = 1) -> list[float]:
    """Steps by gradients that are divided by the mean norm of those that are there."""
    model = Heads()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    backward = torch.Tensor.backward
    if kind == "accelerate":
        option = DistributedDataParallelKwargs(find_unused_parameters=True)
        accelerator = Accelerator(kwargs_handlers=[option])
        wrapped, optimizer = accelerator.prepare(model, optimizer)
        backward = accelerator.backward
    elif kind == "face":
        adoption.note_aware()
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        current.world()
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    rank, found = current.world().rank, []
    for step, heads in enumerate(HEADS):
        loss = torch.zeros(())
        for number in range(passes):
            torch.manual_seed(10 * step + 2 * number + rank)
            loss = wrapped(torch.randn(5, 6), heads[rank]).square().mean()
            backward(loss)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        mean = sum(float(one.norm()) for one in gradients) / len(gradients)
        for one in gradients:
            one.div_(mean)
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item(), float(len(gradients)), mean]
    return [*found, *(p.detach().sum().item() for p in model.parameters())]


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("strategy", ["ddp:find_unused_parameters=true", "horovod"])
def test_gradients_of_a_script_of_ddp_are_there_as_natively(
    world_pool: Any, strategy: str, passes: int
) -> None:
    expected = world_pool(2).run(under, "ddp", scale_by_hand, "torch", passes)
    found = world_pool(2).run(plainly, strategy, scale_by_hand, "face", passes)
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, tuple), one
        assert one[0] == pytest.approx(other)


FINDS = {"find_unused_parameters": True}
FINDS_NONE = {"find_unused_parameters": False}


def by_their_options(kind: str, options: list[dict[str, Any]], later: bool) -> list[float]:
    """Train models whose wrappers have other options: losses, and gradients that there are.

    Args:
        kind: whose wrapper it is.
        options: of the wrappers.
        later: whether one is wrapped when another was trained already.
    """
    if kind == "face":
        adoption.note_aware()
    rank, found = current.world().rank, []
    wrap: Any = DistributedDataParallel if kind == "face" else nn.parallel.DistributedDataParallel

    def wrapped(own: dict[str, Any]) -> Any:
        model = Heads()
        # DDP asks for a gradient of each parameter then.
        model.heads[1:].requires_grad_(any(own.values()))
        return wrap(model, **own)

    models = (wrapped(own) for own in options)
    for own, model in zip(options, models if later else list(models), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, heads in enumerate(HEADS):
            torch.manual_seed(10 * step + rank)
            head = heads[rank] if own == FINDS else 0
            loss = model(torch.randn(5, 6), head).square().mean()
            loss.backward()
            found += [loss.item(), float(sum(p.grad is not None for p in model.parameters()))]
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize(
    ("options", "later"),
    [([FINDS, FINDS_NONE], False), ([{}, FINDS], True), ([{"static_graph": True}, FINDS], True)],
)
def test_options_of_a_wrapper_are_of_its_model(
    world_pool: Any, options: list[dict[str, Any]], later: bool
) -> None:
    expected = world_pool(2).run(under, "ddp", by_their_options, "torch", options, later)
    found = world_pool(2).run(plainly, None, by_their_options, "face", options, later)
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, tuple), one
        assert one[0] == pytest.approx(other)


@pytest.mark.parametrize("size", [1, 2])
def test_so_are_those_of_accelerate(world_pool: Any, size: int) -> None:
    expected = world_pool(size).run(under, None, scale_by_hand, "torch")
    found = world_pool(size).run(under, None, scale_by_hand, "accelerate")
    assert found == [pytest.approx(one) for one in expected]
