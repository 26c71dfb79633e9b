"""Optimizers and models of which a run would lose something: refused before it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from unipar import Session
from unipar.data.batch import Batch, MicroBatch
from unipar.errors import CheckpointError, ConfigError
from unipar.testing.pool import WorldPools
from unipar.world import Placement


class Counting(torch.optim.SGD):
    """It keeps a number of all parameters."""

    def step(self, closure: Any = None) -> Any:
        self.state["steps"] = self.state.get("steps", 0) + 1  # pyright: ignore
        return super().step(closure)


class Noisy(torch.optim.SGD):
    """Langevin's dynamics, by a generator of its own if there is one."""

    generator: torch.Generator | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                noise = torch.randn(parameter.shape, generator=self.generator)
                parameter.add_(noise, alpha=0.01)


class Private(Noisy):
    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.generator = torch.Generator().manual_seed(5)


class Extra(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 1}

    def set_extra_state(self, state: Any) -> None: ...


def squared(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def step(session: Session, kind: type[torch.optim.SGD]) -> Any:
    torch.manual_seed(0)
    engine = session.prepare(
        nn.Linear(3, 2), optimizer=lambda named: kind([p for _, p in named], lr=0.1)
    )
    share = torch.ones(2, 3) * (1 + session.world.rank)
    engine.train_step(Batch((MicroBatch(share, 2),), 2 * session.world.size), squared)
    return [p.tolist() for p in engine.module.parameters()]


def test_state_of_no_parameter_is_refused_before_a_checkpoint_lacks_it() -> None:
    with Session("single", placement=Placement()) as session:
        with pytest.raises(ConfigError, match="Counting keeps state under 'steps'") as refused:
            step(session, Counting)
        assert "param_groups, which are saved" in str(refused.value)


def on_ranks(placement: Placement, strategy: str, kind: type[torch.optim.SGD]) -> Any:
    with Session(strategy, placement=placement) as session:
        try:
            return step(session, kind)
        except ConfigError as error:
            return str(error)


def test_noise_by_which_replicas_would_part_is_refused(world_pool: WorldPools) -> None:
    for said in world_pool(2).run(on_ranks, "ddp", Noisy):
        assert "the optimizer Noisy draws random numbers in its step" in said
        assert "torch.Generator(device).manual_seed(seed)" in said


def test_noise_that_is_alike_on_all_ranks_keeps_replicas_one(world_pool: WorldPools) -> None:
    first, second = world_pool(2).run(on_ranks, "ddp", Private)
    assert isinstance(first, list)
    assert first == second


def test_on_one_process_an_optimizer_may_draw() -> None:
    with Session("single", placement=Placement()) as session:
        assert isinstance(step(session, Noisy), list)


class Locked:
    """A schedule with something that no file can hold."""

    def __init__(self) -> None:
        self.where = object()

    def __call__(self, step: int) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("model", "scheduler", "said"),
    [
        (Extra(3, 2), None, "'_extra_state' in the model's state dict is a dict"),
        (nn.Linear(3, 2), lambda o: LambdaLR(o, Locked()), "lr_scheduler.* holds a object"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_the_first_step(
    model: nn.Module, scheduler: Callable[..., Any] | None, said: str
) -> None:
    with Session("single", placement=Placement()) as session, pytest.raises(CheckpointError) as e:
        session.prepare(
            model,
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
            lr_scheduler=scheduler,
        )
    e.match(said)
