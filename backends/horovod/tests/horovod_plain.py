"""Models, data and a hand-written loop that the tests here compare Horovod with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from unipar.data.batch import Batch, MicroBatch
from unipar.strategy import EngineSpec, registry
from unipar.world import Placement

STEPS, BATCH, WIDTH, EXPERTS = 8, 8, 6, 4
RELATIVE = 1e-5

Named = Iterable[tuple[str, nn.Parameter]]


class Experts(nn.Module):
    """Each sample goes through the expert that its key names, so that many get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.enter(x))
        out = x.clone()
        for key in keys.unique().tolist():
            out[keys == key] = self.experts[key](x[keys == key])
        return self.leave(out)


class Words(nn.Module):
    """Embeddings with sparse gradients; the second of them is looked at for odd keys only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(EXPERTS, WIDTH, sparse=True)
        self.second = nn.Embedding(EXPERTS, WIDTH, sparse=True)
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        out = x + self.first(keys)
        odd = keys % 2 == 1
        if odd.any():
            out = out.index_add(0, odd.nonzero()[:, 0], self.second(keys[odd]))
        return self.leave(out)


def build(cls: Callable[[], nn.Module] = Experts) -> nn.Module:
    torch.manual_seed(3)
    return cls()


def batches() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Inputs, keys and targets. Later batches leave more and more experts out."""
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(BATCH, WIDTH, generator=generator),
            torch.randint(0, EXPERTS - step % EXPERTS, (BATCH,), generator=generator),
            torch.randint(0, 3, (BATCH,), generator=generator),
        )
        for step in range(STEPS)
    ]


def loss_fn(model: Any, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    inputs, keys, targets = batch
    return nn.functional.cross_entropy(model(inputs, keys), targets)


def adamw(named: Named) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=1e-2, weight_decay=0.1)


def sgd(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def share(batch: tuple[torch.Tensor, ...], rank: int, size: int, parts: int = 2) -> Batch:
    """A rank's share of a global batch, in micro-batches."""
    count = BATCH // size // parts
    first = rank * parts * count
    starts = range(first, first + parts * count, count)
    micro = [MicroBatch(tuple(one[at : at + count] for one in batch), count) for at in starts]
    return Batch(tuple(micro), BATCH)


def reference(
    model: nn.Module,
    make: Callable[[Named], torch.optim.Optimizer] = adamw,
    change: Callable[[nn.Module, int], None] = lambda model, step: None,
    max_norm: float | None = 0.5,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A plain loop, nothing of unipar in it: its losses and weights."""
    optimizer = make(model.named_parameters())
    losses = []
    for step, batch in enumerate(batches()):
        change(model, step)
        loss = loss_fn(model, batch)
        optimizer.zero_grad()
        loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], max_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def train(
    placement: Placement,
    strategy: str,
    cls: Callable[[], nn.Module] = Experts,
    make: Callable[[Named], torch.optim.Optimizer] = adamw,
    change: Callable[[nn.Module, int], None] = lambda model, step: None,
    **spec: Any,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights under a strategy."""
    prepared = registry.resolve(strategy)
    world = prepared.setup(placement)
    try:
        spec = {"max_grad_norm": 0.5, **spec}
        engine = prepared.prepare(EngineSpec(build(cls), optimizer=make, **spec), world)
        losses = []
        for step, batch in enumerate(batches()):
            change(engine.module, step)
            own = share(batch, placement.rank, placement.size)
            losses.append(engine.train_step(own, loss_fn).loss)
        return losses, {name: p.detach() for name, p in engine.module.named_parameters()}
    finally:
        prepared.teardown()
        world.leave()


def largest_difference(found: Any, expected: Any) -> float:
    """Of losses, relatively; of weights, relative to the largest of their tensor."""
    losses = max(abs(a - b) / abs(b) for a, b in zip(found[0], expected[0], strict=True))
    weights = max(
        ((found[1][name] - tensor).abs().max() / tensor.abs().max()).item()
        for name, tensor in expected[1].items()
    )
    return max(losses, weights)
