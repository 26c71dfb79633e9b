"""Under fsdp a parameter used outside of the model's forward is refused, in words of our own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor

import unipar
from unipar.errors import ConfigError
from unipar.strategy import Engine
from unipar.world import Placement

DATA = torch.linspace(-1, 1, 32).reshape(8, 4)


def sgd(named: Any) -> optim.Optimizer:
    return optim.SGD([p for _, p in named], lr=0.1)


def mean_square(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def penalized(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return mean_square(model, batch) + 0.01 * sum(p.square().sum() for p in model.parameters())


def penalized_by_norms(model: Any, batch: torch.Tensor) -> unipar.LossSum:
    return unipar.LossSum(model.weight.norm(), len(batch))


def penalized_whole(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return mean_square(model, batch) + 0.01 * whole(model.weight.square().sum())


def projected(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(batch, model.weight).square().mean()


def by_train_step(loss: Any) -> Callable[[Engine, torch.Tensor], None]:
    return lambda engine, data: engine.train_step(
        unipar.Batch((unipar.MicroBatch(data, len(data)),), 2 * len(data)), loss
    )  # pyright: ignore[reportReturnType]


def by_hand(loss: Any) -> Callable[[Engine, torch.Tensor], None]:
    def step(engine: Engine, data: torch.Tensor) -> None:
        def model(x: torch.Tensor) -> torch.Tensor:
            return engine(x)

        model.parameters = engine.module.parameters  # pyright: ignore
        model.weight = engine.module.weight  # pyright: ignore
        engine.backward(loss(model, data), num_items=len(data))

    return step


def evaluated(engine: Engine, data: torch.Tensor) -> None:
    microbatch = unipar.MicroBatch(data, len(data))
    engine.eval_batch(unipar.Batch((microbatch,), len(data)), projected)


def averaged(engine: Engine, data: torch.Tensor) -> None:
    target = torch.zeros(3, 4)
    with torch.no_grad():
        target.mul_(0.9).add_(engine.module.weight, alpha=0.1)  # pyright: ignore


def measured(engine: Engine, data: torch.Tensor) -> None:
    if engine.module.weight.norm().item() > 1e6:  # pyright: ignore
        raise ValueError("the weights have exploded")


def counted(engine: Engine, data: torch.Tensor) -> None:
    torch.count_nonzero(engine.module.weight).item()  # pyright: ignore


def differentiated(engine: Engine, data: torch.Tensor) -> None:
    # None where it is allowed that no graph leads there, and a shard's is never in one.
    loss = engine(data).square().mean()
    weights = [*engine.module.parameters()]
    torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)


class Model(nn.Module):
    """A linear layer that is a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    @property
    def weight(self) -> torch.Tensor:
        return self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def outcome(placement: Placement, act: Callable[[Engine, torch.Tensor], None]) -> str:
    try:
        with unipar.Session({"name": "fsdp", "wrap": ["Linear"]}, placement=placement) as session:
            act(session.prepare(Model(), optimizer=sgd), DATA[placement.rank :: 2])
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (by_train_step(penalized), ["the loss is a DTensor", "weight_decay"]),
        (by_hand(penalized), ["the loss is a DTensor"]),
        (by_train_step(penalized_by_norms), ["the loss is a DTensor"]),
        (
            by_train_step(penalized_whole),
            ["loss depends on parameter 'inner.weight'", "weight_decay=2c"],
        ),
        (by_hand(penalized_whole), ["the loss depends on parameter 'inner.weight'"]),
        (by_train_step(projected), ["outside of the model's forward pass", "weight_decay=2c"]),
        (evaluated, ["outside of the model's forward pass"]),
        (averaged, ["outside of the model's forward pass", "[p.detach().clone() for p in"]),
        (measured, ["a number was read", "would be of this rank's part", "full_tensor()"]),
        (counted, ["a number was read"]),
        (differentiated, ["autograd.grad was asked for the gradient of parameter 'inner.weight'"]),
    ],
)
def test_a_shard_used_as_if_it_were_the_parameter_is_refused(
    world_pool: Any, act: Callable[[Engine, torch.Tensor], None], says: list[str]
) -> None:
    for said in world_pool(2).run(outcome, act):
        for part in says:
            assert part in said


def test_fit_says_so_too(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"outside of the model's forward pass.*'fsdp'") as caught:
        unipar.fit(
            nn.Linear(4, 3),
            DATA,
            strategy="fsdp",
            device="cpu",
            devices=1,
            global_batch_size=8,
            loss=projected,
            output_dir=tmp_path,
            checkpoint=False,
            progress=False,
        )
    assert "mixed torch.Tensor and DTensor" in str(caught.value.__cause__)


def with_a_penalty(placement: Placement, strategy: str) -> list[torch.Tensor]:
    """Weights after steps whose loss uses, after the forward pass, what is outside of all units."""

    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.head = Model(), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x).tanh())

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        out = model(batch.clone().requires_grad_())
        return out.square().mean() + 0.1 * net.head.weight.norm()

    own: Any = {"name": "fsdp", "wrap": ["Model"]} if strategy == "fsdp" else strategy
    with unipar.Session(own, placement=placement) as session:
        net: Any = Outside()
        engine = session.prepare(net, optimizer=sgd)
        for batch in session.loader(DATA, global_batch_size=5, shuffle=False):
            engine.train_step(batch, loss)
            engine.eval_batch(batch, mean_square)
            # No copy is left of what a pass has gathered: what is changed here stays changed.
            with torch.no_grad():
                net.head.weight.mul_(0.99)
        return [whole(p.detach()) for p in engine.module.parameters()]


def test_what_is_outside_of_units_may_be_used_after_the_forward_pass(world_pool: Any) -> None:
    plain = world_pool(1).run(with_a_penalty, "single")[0]
    for found in world_pool(2).run(with_a_penalty, "fsdp"):
        torch.testing.assert_close(found, plain)


def remedies(placement: Placement, strategy: str) -> dict[str, Any]:
    """What the messages advise, each beside what a plain loop would do."""

    class Penalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.inner(x), self.inner.weight.norm()

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        out, penalty = model(batch)
        return out.square().mean() + 0.1 * penalty

    def decayed(named: Any) -> optim.Optimizer:
        return optim.SGD([p for _, p in named], lr=0.1, weight_decay=0.02)

    with unipar.Session(strategy, placement=placement) as session:
        engine = session.prepare(Penalized(), optimizer=decayed)
        target = [p.detach().clone() for p in engine.module.parameters()]
        # Ranks of unequal share: five samples over two.
        for batch in session.loader(DATA, global_batch_size=5, shuffle=False):
            engine.train_step(batch, loss)
            for own, p in zip(target, engine.module.parameters(), strict=True):
                with torch.no_grad():
                    own.mul_(0.9).add_(p, alpha=0.1)
        weights = [whole(p.detach()) for p in engine.module.parameters()]
        norms = [whole(p.detach().norm()).item() for p in engine.module.parameters()]
        return {"weights": weights, "average": [whole(own) for own in target], "norms": norms}


def test_what_is_advised_makes_the_run_of_a_plain_loop(world_pool: Any) -> None:
    plain = world_pool(1).run(remedies, "single")[0]
    for found in world_pool(2).run(remedies, "fsdp"):
        torch.testing.assert_close(found, plain)


def prepared_twice(placement: Placement, make: Callable[[nn.Linear], Any]) -> str:
    encoder = nn.Linear(4, 4)
    second = make(encoder)
    with unipar.Session("fsdp", placement=placement) as session:
        session.prepare(encoder, optimizer=sgd, name="first")
        with pytest.raises(ConfigError) as refused:
            session.prepare(second, optimizer=sgd, name="second")
        session.prepare(nn.Linear(4, 4), optimizer=sgd, name="third")
    return str(refused.value)


def tied(encoder: nn.Linear) -> nn.Module:
    decoder = nn.Linear(4, 4)
    decoder.weight = encoder.weight
    return decoder


@pytest.mark.parametrize(
    "make",
    [
        lambda encoder: encoder,
        lambda encoder: nn.Sequential(encoder, nn.Linear(4, 2)),
        tied,
        lambda encoder: lambda: encoder,
    ],
    ids=["itself", "a part of another", "one tensor", "by a function"],
)
def test_a_parameter_of_two_engines_is_refused(world_pool: Any, make: Any) -> None:
    for said in world_pool(2).run(prepared_twice, make):
        assert "for engine 'second' is engine 'first's already" in said
