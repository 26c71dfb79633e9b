"""The FSDP plugin: really divided, with the user's groups, and refused where it would go wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from unipar import Session, registry
from unipar.batch import Batch, MicroBatch
from unipar.checks import check_capabilities
from unipar.errors import ConfigError
from unipar.strategy import EngineSpec
from unipar.testing.compare import assemble_weights, assert_equal_weights
from unipar.testing.harness import Exported
from unipar.testing.models import Network, Tied
from unipar.testing.pool import WorldPools
from unipar.world import Placement

FSDP = "colossalai:plugin=fsdp"


def adamw(named: Any) -> optim.Optimizer:
    return optim.AdamW([p for _, p in named], lr=1e-2)


def square(model: Any, x: Any) -> torch.Tensor:
    return model(x).square().mean()


def network(seed: int = 3) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Network(4, 2)


def train(engine: Any, world: Any, loss: Any = square, steps: int = 2) -> Exported:
    for step in range(steps):
        mine = torch.linspace(-1, 1, 8).reshape(2, 4) * (step + 1 + world.rank)
        engine.train_step(Batch((MicroBatch(mine, 2),), 2 * world.size), loss)
    return Exported.of(engine)


def with_engine(
    placement: Placement, strategy: str, fn: Any, model: nn.Module, **asked: Any
) -> Any:
    """``fn(engine, world)``, or what was refused."""
    used = registry.resolve(strategy)
    world = used.setup(placement)
    try:
        engine = used.prepare(EngineSpec(model, **{"optimizer": adamw, **asked}), world)
        try:
            return fn(engine, world)
        finally:
            engine.close()
    except ConfigError as error:
        return str(error)
    finally:
        used.teardown()
        world.leave()


# -- what it does --------------------------------------------------------------------------------


def shares(engine: Any, world: Any) -> tuple[int, int]:
    train(engine, world)
    held = sum(p.numel() for p in engine.module.parameters())
    moments = sum(
        value.numel()
        for state in engine.optimizer.state.values()
        for value in state.values()
        if value.ndim
    )
    return held, moments


@pytest.mark.parametrize("options", ["", ",wrap=none", ",wrap=[Block],sharding=grad_op"])
def test_ranks_hold_a_part_of_weights_and_moments(options: str, world_pool: WorldPools) -> None:
    whole = sum(p.numel() for p in network().parameters())
    results = world_pool(4).run(with_engine, FSDP + options, shares, network())
    assert sum(held for held, _ in results) == whole
    assert max(held for held, _ in results) < whole / 2
    assert sum(moments for _, moments in results) == 2 * whole


def test_units_change_no_number(world_pool: WorldPools) -> None:
    runs = [
        world_pool(2).run(with_engine, FSDP + options, train, network())
        for options in ("", ",wrap=none", ",wrap=[Linear],sharding=grad_op")
    ]
    for other in runs[1:]:
        assert_equal_weights(assemble_weights(other), assemble_weights(runs[0]), 1e-6)


def test_rank_0s_weights_are_everyones(world_pool: WorldPools) -> None:
    def run(placement: Placement) -> Any:
        return with_engine(placement, FSDP, train, network(3 + placement.rank))

    apart = world_pool(2).run(run)
    alike = world_pool(2).run(with_engine, FSDP, train, network())
    assert_equal_weights(assemble_weights(apart), assemble_weights(alike), 0.0)


class Scaled(nn.Module):
    """Fewer weights than there are ranks."""

    def __init__(self, factor: torch.Tensor) -> None:
        super().__init__()
        self.factor = nn.Parameter(factor)
        self.shift = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :2] * self.factor + self.shift


@pytest.mark.parametrize(
    ("plugin", "precision"), [("fsdp", "fp32"), ("fsdp", "fp16"), ("gemini", "fp16")]
)
def test_a_rank_may_hold_nothing(plugin: str, precision: str, world_pool: WorldPools) -> None:
    def steps(engine: Any, world: Any) -> Exported:
        # Some are skipped until fp16 has found its loss scale.
        return train(engine, world, steps=12)

    def run(placement: Placement) -> Any:
        asked = {"precision": precision, "max_grad_norm": 0.1}
        model = Scaled(torch.tensor(1.0) if plugin == "gemini" else torch.ones(1))
        return with_engine(placement, f"colossalai:plugin={plugin}", steps, model, **asked)

    weights = assemble_weights(world_pool(4).run(run))
    assert all((tensor != 1).all() and tensor.isfinite().all() for tensor in weights.values())
    if precision == "fp32":
        assert_equal_weights(weights, plainly_trained(), 1e-5)


def plainly_trained() -> dict[str, torch.Tensor]:
    model = Scaled(torch.ones(1))
    optimizer = adamw(model.named_parameters())
    for step in range(12):
        rows = [torch.linspace(-1, 1, 8).reshape(2, 4) * (step + 1 + rank) for rank in range(4)]
        optimizer.zero_grad()
        square(model, torch.cat(rows)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


# -- what it refuses -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("native={sharding_strategy: 1}", "the option 'sharding'"),
        ("native={mixed_precision: true}", "the run's precision"),
        ("native={cpu_offload: true}", "It takes: none"),
    ],
)
def test_native_arguments_are_refused(options: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_capabilities(
            registry.resolve(f"{FSDP},{options}"), EngineSpec(nn.Linear(2, 2)), Placement(size=2)
        )


def test_units_that_share_a_weight_are_refused(world_pool: WorldPools) -> None:
    (said,) = world_pool(1).run(with_engine, f"{FSDP},wrap=[Embedding]", train, Tied())
    assert "'head.weight' is a weight of unit 0 (Embedding) and of another part" in said


def test_a_class_that_the_model_does_not_have_is_refused(world_pool: WorldPools) -> None:
    (said,) = world_pool(1).run(with_engine, f"{FSDP},wrap=[Blocks]", train, network())
    assert "Did you mean 'Block'?" in said


def test_a_scalar_weight_is_refused() -> None:
    model = Scaled(torch.tensor(1.0))
    with pytest.raises(ConfigError, match="'factor' is a scalar"):
        check_capabilities(registry.resolve(FSDP), EngineSpec(model), Placement(size=2))


class Spare(nn.Module):
    """The loss does not depend on one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@pytest.mark.parametrize("options", ["", ",wrap=[Linear]"])
def test_a_weight_without_gradient_is_named(options: str, world_pool: WorldPools) -> None:
    for said in world_pool(2).run(with_engine, FSDP + options, train, Spare()):
        assert "does not depend on 2 of the parameters to train: spare.weight, spare.bias" in said


def test_weights_that_are_not_there_are_not_read(world_pool: WorldPools) -> None:
    def penalized(model: Any, x: Any) -> torch.Tensor:
        return square(model, x) + sum(p.square().sum() for p in model.parameters())

    def run(engine: Any, world: Any) -> Any:
        return train(engine, world, penalized)

    said = world_pool(1).run(with_engine, FSDP, run, network())[0]
    assert "which are divided among ranks" in said

    def around(engine: Any, world: Any) -> Any:
        return engine.module(torch.ones(2, 4))

    said = world_pool(1).run(with_engine, FSDP, around, network())[0]
    assert "engine.module was called" in said


def test_an_optimizer_that_may_need_whole_tensors_is_refused(world_pool: WorldPools) -> None:
    def run(placement: Placement) -> Any:
        def adafactor(named: Any) -> optim.Optimizer:
            return optim.Adafactor([p for _, p in named])

        return with_engine(placement, FSDP, train, network(), optimizer=adafactor)

    assert "elementwise_optimizer=true" in world_pool(1).run(run)[0]


def test_a_second_model_is_refused(world_pool: WorldPools) -> None:
    def run(placement: Placement) -> str:
        with Session(FSDP, device="cpu", placement=placement) as session:
            session.prepare(network(), optimizer=adamw)
            try:
                session.prepare(network(), optimizer=adamw, name="other")
            except ConfigError as error:
                return str(error)
        return "it was taken"

    assert "taken" not in world_pool(1).run(run)[0]
