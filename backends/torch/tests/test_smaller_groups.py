"""Groups of several sizes in one model: no gradient or loss is weighted by the size of its group.

A model with experts that ranks divide among them (``ep``), so that their gradients are reduced over
fewer ranks than the dense ones; and ranks that hold parts of a sequence (``cp``). Both are written
here in the plainest way, by gathering.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from unipar.data import Loader
from unipar.engine import StepEngine, sum_shards
from unipar.errors import ConfigError
from unipar.layout import Layout
from unipar.loss import LossSum
from unipar.strategy import EngineSpec
from unipar.world import Placement, World, joined
from unipar_torch.sharding import ShardReducer

TOKENS, WIDTH, EXPERTS, LENGTH, BATCH, STEPS = 13, 6, 4, 8, 8, 4


class Gather(torch.autograd.Function):
    """All ranks' parts along a dimension, each of which uses all of them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad = grads[0].contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), ctx.dim)[ctx.group.rank()], None, None


class SumAndScatter(torch.autograd.Function):
    """This rank's part of the sum of all ranks' tensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x.chunk(group.size())[group.rank()]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        parts = [torch.empty_like(grads[0]) for _ in range(ctx.group.size())]
        dist.all_gather(parts, grads[0].contiguous(), group=ctx.group)
        return torch.cat(parts), None


class Experts(nn.Module):
    """A token goes to the expert that its number says; ``group`` divides the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH)
        self.group: Any = None

    def keep(self, group: Any) -> None:
        self.group = group
        self.weight = nn.Parameter(self.weight.detach().chunk(group.size())[group.rank()].clone())

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        first = 0
        if self.group is not None:
            first = self.group.rank() * len(self.weight)
            x, tokens = Gather.apply(x, self.group, 0), Gather.apply(tokens, self.group, 0)  # type: ignore
        chosen = nn.functional.one_hot(tokens % EXPERTS, EXPERTS)[:, first:][:, : len(self.weight)]
        out = torch.einsum("te,td,edf->tf", chosen.to(x.dtype), x, self.weight)
        return out if self.group is None else SumAndScatter.apply(out, self.group)  # type: ignore


class Model(nn.Module):
    """Each token sees the mean of those up to it; ``group`` divides each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.experts = Experts()
        self.head = nn.Linear(WIDTH, TOKENS)
        self.group: Any = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        seen = x if self.group is None else Gather.apply(x, self.group, 1)
        seen = seen.cumsum(1) / torch.arange(1, LENGTH + 1)[:, None]  # type: ignore
        if self.group is not None:
            seen = seen.chunk(self.group.size(), 1)[self.group.rank()]
        x = x + seen
        return self.head(x + self.experts(x.flatten(0, 1), tokens.flatten()).view(x.shape))


def build() -> Model:
    torch.manual_seed(2)
    return Model()


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.5, momentum=0.9)


def sequences() -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randint(0, TOKENS, (BATCH * STEPS, LENGTH + 1), generator=generator)


def loss_of(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> LossSum:
    # Masked, so that ranks have different numbers of items.
    mask = labels % 3 > 0
    losses = nn.functional.cross_entropy(model(tokens).transpose(1, 2), labels, reduction="none")
    return LossSum((losses * mask).sum(), mask.sum())


def by_hand() -> tuple[list[float], dict[str, torch.Tensor]]:
    model, losses = build(), []
    optimizer = sgd(model.named_parameters())
    for batch in sequences().split(BATCH):
        summed = loss_of(model, batch[:, :-1], batch[:, 1:])
        loss = summed.total / summed.count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def prepare(world: World) -> StepEngine:
    layout, model = world.layout, build()
    replicate = ("dp_replicate",) if layout.dp_replicate > 1 else ()
    if layout.cp > 1:
        model.group = world.mesh("cp").get_group()
    if layout.ep > 1:
        model.experts.keep(world.mesh("ep").get_group())
        fully_shard(model.experts, mesh=world.mesh(*replicate, "efsdp"))
    fully_shard(model, mesh=world.mesh(*replicate, "fsdp"))
    sum_shards(model)
    spec, optimizer = EngineSpec(model, optimizer=sgd), sgd(model.named_parameters())
    return StepEngine(spec, world, model, optimizer, reducer=ShardReducer(model, world))


def train(placement: Placement, layout: Layout) -> tuple[list[float], dict[str, torch.Tensor]]:
    with joined(placement, layout) as world:
        engine = prepare(world)

        def loss(model: Any, batch: torch.Tensor) -> LossSum:
            at = layout.coordinate("cp", placement.rank)
            tokens, labels = (x.chunk(layout.cp, 1)[at] for x in (batch[:, :-1], batch[:, 1:]))
            return loss_of(model, tokens, labels)

        loader = Loader(
            sequences(),
            global_batch_size=BATCH,
            # Two parts: what the step is normalized by is known after the second.
            micro_batch_size=BATCH // layout.batch // 2,
            data_rank=world.data_rank,
            data_size=world.data_size,
            shuffle=False,
        )
        losses = [engine.train_step(batch, loss).loss for batch in loader]
        weights = engine.module.named_parameters()  # type: ignore
        return losses, {name: p.full_tensor().detach() for name, p in weights}  # type: ignore


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_shard=2, ep=2),
        Layout(cp=2),
        Layout(dp_shard=2, cp=2, ep=2),
        Layout(dp_replicate=2, dp_shard=2, ep=2),
    ],
    ids=["ep", "cp", "cp and ep", "replicas and ep"],
)
def test_losses_and_weights_are_those_of_one_process(world_pool: Any, layout: Layout) -> None:
    losses, weights = by_hand()
    for rank, (found, own) in enumerate(world_pool(layout.size).run(train, layout)):
        assert found == pytest.approx(losses, rel=1e-5)
        for name, expected in weights.items():
            if name == "experts.weight":
                expected = expected.chunk(layout.ep)[layout.coordinate("ep", rank)]
            torch.testing.assert_close(own[name], expected, rtol=1e-5, atol=1e-5, msg=name)


def mean_of_a_part(placement: Placement) -> str:
    with joined(placement, Layout(cp=2)) as world:
        engine = prepare(world)
        loader = Loader(sequences(), global_batch_size=BATCH, shuffle=False)
        with pytest.raises(ConfigError) as refused:
            engine.train_step(next(iter(loader)), lambda model, x: model(x[:, :4]).square().mean())
        return str(refused.value)


def test_a_mean_over_parts_of_sequences_is_refused(world_pool: Any) -> None:
    assert all("LossSum" in said for said in world_pool(2).run(mean_of_a_part))
