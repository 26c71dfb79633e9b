"""What few models do that ranks compute in parts, held against plain PyTorch on one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from plain_scripts import batches, check, plainly, train
from torch import nn
from torch.nn import functional

from unipar.compat.dividing import signatures

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)


def squares(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


class Clips(Base):
    """Its rows are frames, four of a clip."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.view(-1, 4, 6)).tanh().mean(1)


class Scaled(Base):
    """It gives a weight beside what it computes, by which the script computes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x), self.scale


class Deep(Base):
    def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        for _ in range(depth):
            x = self.linear(x).tanh()
        return x


class Hiding(Base):
    """Its noise is flat, so that entries of a sample may lie in two ways, and has no effect yet."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(x.numel()).view_as(x)
        return self.linear(x) + self.gate * noise


class Hidden(Hiding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + 0.0 * torch.randn(x.numel()).view_as(x)


class Shrinking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return functional.hardshrink(grads[0], 1e-3)


class Clamping(Shrinking):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].clamp(-4, 4)


class Shrunk(Base):
    """Its backward pass is linear but for small gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, Shrinking.apply(self.linear(x)))


class Clamped(Base):
    """Its backward pass is linear but for large gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, Clamping.apply(self.linear(x)))


class Seeded(Base):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + torch.randn(x.shape, generator=self.generator)


class Demanding(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) < 4:
            raise ValueError("it wants four samples")
        return self.norm(self.linear(x))


class Routed(Base):
    """Each sample goes to one of two experts, and those that get none are not called."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.linear(x)
        to_first = x[:, 0] > 0
        for expert, rows in zip(self.experts, (to_first, ~to_first), strict=True):
            if rows.any():
                output = output.index_add(0, rows.nonzero()[:, 0], expert(x[rows]))
        return output


def clips() -> list[float]:
    """One clip alone is not divided."""
    torch.manual_seed(1)
    return train(Clips(), squares, batches(16, 4, 16))


def scaled() -> list[float]:
    torch.manual_seed(1)

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        output, scale = model(x)
        return (scale * output - 1).square().mean()

    return train(Scaled(), loss_of, batches(4, 4, 4))


def hiding() -> list[float]:
    torch.manual_seed(1)
    return train(Hiding(), squares, batches(4, 4, 4, 4))


@pytest.mark.parametrize("act", [clips, scaled, hiding])
def test_they_make_what_one_process_makes(world_pool: Any, act: Callable[[], list[float]]) -> None:
    check(world_pool(2).run(plainly, "ddp", act), act)


def deep() -> list[float]:
    torch.manual_seed(1)
    depths = iter([1, 2, 3, 1, 4, 5, 2])
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(signatures, "_MOST_GRAPHS", 3)
        return train(
            Deep(), lambda model, x: model(x, next(depths)).square().mean(), batches(*[4] * 7)
        )


def test_one_that_computes_in_ever_other_ways_is_told_of(world_pool: Any) -> None:
    check(world_pool(2).run(plainly, "ddp", deep), deep, "Deep computes in ever other ways")


def of(kind: type[nn.Module]) -> list[float]:
    torch.manual_seed(1)
    return train(kind(), squares, batches(*[4] * 10))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Hidden, "which of its random numbers belong to which sample does not show"),
        (Shrunk, "as its gradients show"),
        (Clamped, "as its gradients show"),
        (Seeded, "draws random numbers by a generator of its own"),
        (Demanding, "it wants four samples"),
    ],
)
def test_others_are_computed_whole_and_told_of(
    world_pool: Any, kind: type[nn.Module], why: str
) -> None:
    act = partial(of, kind)
    check(world_pool(2).run(plainly, "ddp", act), act, why)


def routed() -> list[float]:
    """Ranks want one expert each, from the second batch on."""
    torch.manual_seed(1)
    xs = batches(8, 8, 8)
    for x in xs[1:]:
        x[:4, 0] = x[:4, 0].abs()
        x[4:, 0] = -x[4:, 0].abs()
    return train(Routed(), squares, xs)


def test_ranks_may_use_other_experts(world_pool: Any) -> None:
    check(world_pool(2).run(plainly, "ddp", routed), routed)


@pytest.mark.parametrize("strategy", ["fsdp", "zero1", "zero2"])
def test_where_they_sum_block_after_block_none_is_left_out(world_pool: Any, strategy: str) -> None:
    told = "ranks use other weights of it for their parts, as of experts"
    check(world_pool(2).run(plainly, strategy, routed), routed, told)
