"""A script's own functions of gradients see those of the global batch, or are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from unipar import LossSum, Session
from unipar.errors import ConfigError
from unipar.testing.pool import WorldPools
from unipar.world import Placement

pytestmark = pytest.mark.slow

SAMPLES, BATCH, BOUND = 24, 8, 0.05


def data() -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))
    return both[:, :6], both[:, 6:]


def build() -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(6, 2)


def hooked() -> nn.Linear:
    model = build()
    clamp_weight(model)
    return model


def clamp_weight(model: nn.Module) -> None:
    weight = next(model.parameters())
    weight.register_hook(lambda gradient: gradient.clamp(-BOUND, BOUND))


def sgd(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def clamping(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    parameters = dict(named)
    optimizer = sgd(parameters.items())

    def clamp(*_: Any) -> None:
        gradient = parameters["weight"].grad
        assert gradient is not None
        gradient.clamp_(-BOUND, BOUND)

    optimizer.register_step_pre_hook(clamp)
    return optimizer


def mean(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def total(model: Any, batch: Any) -> LossSum:
    return LossSum((model(batch[0]) - batch[1]).square().sum(), batch[1].numel())


def expected() -> list[float]:
    model, (xs, ys) = hooked(), data()
    optimizer = sgd(model.named_parameters())
    for first in range(0, SAMPLES, BATCH):
        optimizer.zero_grad()
        mean(model, (xs[first : first + BATCH], ys[first : first + BATCH])).backward()
        optimizer.step()
    return model.weight.flatten().tolist()


def train(
    placement: Placement,
    strategy: str,
    model: Callable[[], nn.Linear],
    optimizer: Any,
    loss: Any,
    size: int,
    builds: bool = True,
    prepared: Callable[[nn.Module], object] = nn.Module.train,
) -> list[float] | str:
    with Session(strategy, device="cpu", placement=placement) as session:
        try:
            engine = session.prepare(model if builds else model(), optimizer=optimizer)
            prepared(engine.module)
            samples = list(zip(*data(), strict=True))
            loader = session.loader(
                samples, global_batch_size=BATCH, micro_batch_size=size, shuffle=False
            )
            for batch in loader:
                engine.train_step(batch, loss)
        except ConfigError as error:
            return str(error)
        return engine.module.weight.flatten().tolist()  # pyright: ignore


def test_a_hook_of_one_process_sees_what_a_plain_loop_shows(world_pool: WorldPools) -> None:
    [found] = world_pool(1).run(train, "single", hooked, sgd, mean, BATCH)
    assert found == pytest.approx(expected(), rel=1e-5)


@pytest.mark.parametrize(
    ("size", "strategy", "loss", "micro_batch"),
    [(2, "ddp", mean, BATCH // 2), (1, "single", mean, BATCH // 2), (1, "single", total, BATCH)],
)
@pytest.mark.parametrize("builds", [True, False])
def test_a_hook_is_refused_where_it_would_see_a_part(
    world_pool: WorldPools, size: int, strategy: str, loss: Any, micro_batch: int, builds: bool
) -> None:
    for said in world_pool(size).run(train, strategy, hooked, sgd, loss, micro_batch, builds):
        assert said.startswith("weight of the model: a hook on the gradient of a parameter would")
        assert "optimizer.register_step_pre_hook(…), in the function that builds it" in said


def test_one_that_is_put_on_afterwards_is_seen_too(world_pool: WorldPools) -> None:
    [found] = world_pool(1).run(train, "single", build, sgd, mean, BATCH, False, clamp_weight)
    assert found == pytest.approx(expected(), rel=1e-5)
    for size, strategy, micro_batch in ((2, "ddp", BATCH // 2), (1, "single", BATCH // 2)):
        for said in world_pool(size).run(
            train, strategy, build, sgd, mean, micro_batch, False, clamp_weight
        ):
            assert said.startswith("weight of the model: a hook on the gradient of a parameter wou")


@pytest.mark.parametrize("size", [1, 2])
def test_one_that_parts_of_parameters_have_is_refused(world_pool: WorldPools, size: int) -> None:
    for said in world_pool(size).run(
        train, "fsdp", build, sgd, mean, BATCH // size, False, clamp_weight
    ):
        assert said.startswith("weight of the model: a hook was put on the gradient of a parameter")
        assert "called with a part of the gradient, or not at all" in said
        assert said.endswith("or use strategy='ddp'.")


@pytest.mark.parametrize(("size", "strategy"), [(2, "ddp"), (1, "single")])
def test_the_optimizers_hook_finds_the_gradient_of_the_global_batch(
    world_pool: WorldPools, size: int, strategy: str
) -> None:
    for found in world_pool(size).run(train, strategy, build, clamping, mean, BATCH // 4):
        assert found == pytest.approx(expected(), rel=1e-5)
