"""Weights that forward passes write, in scripts that have data of their own on each rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from faces import by_accelerate, by_fabric, under
from plain_scripts import plainly
from torch import nn

from unipar.compat.native.wrappers import DistributedDataParallel
from unipar.compat.run import current
from unipar.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
IN_PARTS = ("zero1", "zero2", "ddp:shard_optimizer=true")
"""Strategies by which each rank steps a part of the weights, and gives it to others."""
TOKENS = torch.randint(0, 10, (8, 2, 6), generator=torch.Generator().manual_seed(0))
"""Of each step and rank six."""


class Renormed(nn.Module):
    """Each rank writes the rows that it looks up."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 4, max_norm=0.5)
        self.head = nn.Linear(4, 1)

    def forward(self, tokens: torch.Tensor, step: int) -> torch.Tensor:
        return self.head(self.embedding(tokens))


class Clamped(Renormed):
    """All ranks write the same."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)

    def forward(self, tokens: torch.Tensor, step: int) -> torch.Tensor:
        with torch.no_grad():
            self.embedding.weight.clamp_(-0.5, 0.5)
        return super().forward(tokens, step)


class Late(Clamped):
    """Ranks write what others do not, in a step that is looked at for no other reason."""

    def __init__(self, ranks: tuple[int, ...], clamps: bool) -> None:
        super().__init__()
        self.ranks, self.clamps = ranks, clamps

    def forward(self, tokens: torch.Tensor, step: int) -> torch.Tensor:
        forward = super().forward if self.clamps else super(Clamped, self).forward
        output = forward(tokens, step)
        rank = current.placement().rank
        if step == 4 and rank in self.ranks:
            with torch.no_grad():
                self.embedding.weight[rank] += 1.0
        return output


def loss_of(model: Any, tokens: torch.Tensor, step: int) -> torch.Tensor:
    return (model(tokens, step)[:, 0] - tokens).square().mean()


def train(build: Callable[[], nn.Module]) -> list[float]:
    """This rank's losses."""
    model = DistributedDataParallel(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step, shares in enumerate(TOKENS):
        optimizer.zero_grad()
        loss = loss_of(model, shares[current.placement().rank], step)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def by_hand(build: Callable[[], nn.Module]) -> list[list[float]]:
    """Those of each replica, whose gradients are averaged."""
    models = [build(), build()]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in models]
    found: list[list[float]] = [[], []]
    for step, shares in enumerate(TOKENS):
        for rank, model in enumerate(models):
            model.zero_grad()
            loss = loss_of(model, shares[rank], step)
            loss.backward()
            found[rank].append(loss.item())
        for first, second in zip(*(one.parameters() for one in models), strict=True):
            assert first.grad is not None
            assert second.grad is not None
            first.grad = (first.grad + second.grad) / 2
            second.grad = first.grad.clone()
        for one in optimizers:
            one.step()
    return found


@pytest.mark.parametrize("build", [Renormed, Clamped])
def test_replicas_keep_what_each_has_written(world_pool: Any, build: Any) -> None:
    expected = by_hand(build)
    for rank, (found, told) in enumerate(world_pool(2).run(plainly, "ddp", partial(train, build))):
        assert found == pytest.approx(expected[rank], rel=1e-4)
        assert not told


@pytest.mark.parametrize("strategy", IN_PARTS)
def test_what_ranks_have_written_alike_is_kept(world_pool: Any, strategy: str) -> None:
    expected = by_hand(Clamped)
    found = world_pool(2).run(plainly, strategy, partial(train, Clamped))
    for rank, (losses, told) in enumerate(found):
        assert losses == pytest.approx(expected[rank], rel=1e-4)
        assert not told


@pytest.mark.parametrize("strategy", IN_PARTS)
@pytest.mark.parametrize(
    "build",
    [
        Renormed,
        partial(Late, (0, 1), True),
        partial(Late, (0, 1), False),
        partial(Late, (1,), True),
        # The other one has written nothing, and looks at nothing.
        partial(Late, (1,), False),
    ],
    ids=["each step", "one of them", "one step", "one rank in one of them", "one rank in one step"],
)
def test_what_would_be_put_together_of_ranks_is_refused(
    world_pool: Any, build: Any, strategy: str
) -> None:
    for said in world_pool(2).run(plainly, strategy, partial(train, build)):
        assert "the ranks have unlike weights embedding.weight: something other than" in said
        assert "such as ddp without shard_optimizer, under which each rank keeps" in said


def refusal(face: Any) -> str:
    prepared, step = face(Renormed())
    loss = loss_of(prepared, TOKENS[0, current.placement().rank], 0)
    with pytest.raises(ConfigError) as refused:
        step(loss)
    return str(refused.value)


@pytest.mark.parametrize("face", [by_accelerate, by_fabric])
def test_so_it_is_behind_other_faces(world_pool: Any, face: Any) -> None:
    for said in world_pool(2).run(under, "zero2", refusal, face):
        assert "the ranks have unlike weights embedding.weight" in said
