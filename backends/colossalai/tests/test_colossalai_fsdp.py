"""The FSDP plugin: really divided, with the user's groups, and refused where it would go wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from colossalai_engines import FSDP, adamw, network, square, train, with_engine
from torch import nn

from unipar.engine.checks import check_capabilities
from unipar.errors import ConfigError
from unipar.strategy import EngineSpec, registry
from unipar.testing.compare import assemble_weights, assert_equal_weights
from unipar.testing.harness import Exported
from unipar.testing.models import Tied
from unipar.testing.pool import WorldPools
from unipar.world import Placement

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
