"""Weights that each rank computes or reads for itself: equal everywhere, nowhere all at once."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import unipar
from unipar.errors import CheckpointError, ConfigError
from unipar.state import is_dtensor
from unipar.strategy.initial import named_tensors
from unipar.utils.deferred import DeferredModel
from unipar.world import Placement

WIDTH = 16
STRATEGIES = ("ddp", "fsdp", "fsdp:cpu_offload=true", "mesh:tp=2", "mesh:pp=2")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.arange(WIDTH) / WIDTH, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Tied weights, weights that are initialized twice, and buffers that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2 * WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.head.weight = self.embedding.weight
        self.apply(self._begin)

    def _begin(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def differing() -> nn.Module:
    model = Model()
    noise = np.random.default_rng().normal(size=WIDTH).astype("float32")
    model.blocks[0].norm.bias.data.copy_(torch.from_numpy(noise))  # pyright: ignore
    return model


def made(placement: Placement, strategy: str, weights: Any, build: Any = Model) -> Any:
    """Whole values by name, as this rank has them, and the most whole ones at once."""
    computed: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    compute: Any = DeferredModel.compute

    def counting(self: DeferredModel, name: str) -> torch.Tensor:
        gc.collect()
        alive.append(sum(one() is not None for one in computed))
        value = compute(self, name)
        computed.append(weakref.ref(value))
        return value

    DeferredModel.compute = counting
    try:
        with unipar.Session(strategy=strategy, placement=placement, seed=3) as session:
            engine = session.prepare(build, optimizer="adamw", initial_weights=weights)
            values = {
                # A stage's names are the model's, behind its own.
                name: (t.full_tensor() if is_dtensor(t) else t).detach().clone()
                for name, t in named_tensors(engine.module).items()
            }
    finally:
        DeferredModel.compute = compute
    return values, alive


@pytest.fixture(scope="module")
def alone(world_pool: Any) -> dict[str, torch.Tensor]:
    return world_pool(1).run(made, "single", "by_name")[0][0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_by_name_every_strategy_begins_with_the_same(
    world_pool: Any, alone: dict[str, torch.Tensor], strategy: str
) -> None:
    found = world_pool(2).run(made, strategy, "by_name")
    assert {name for values, _ in found for name in values} == alone.keys()
    for values, alive in found:
        for name, value in values.items():
            assert torch.equal(value, alone[name]), name
        # The one that the caller has not let go of yet.
        assert max(alive) <= 1


def test_by_name_weights_are_initialized_as_the_function_says(
    alone: dict[str, torch.Tensor],
) -> None:
    torch.manual_seed(3)
    wanted = named_tensors(Model())
    for name, value in alone.items():
        torch.testing.assert_close(value.std(), wanted[name].std(), rtol=0.2, atol=1e-6)
    assert not torch.equal(alone["blocks.0.up.weight"], wanted["blocks.0.up.weight"])


def test_left_out_the_weights_are_those_of_the_function(world_pool: Any) -> None:
    torch.manual_seed(3)
    wanted = named_tensors(Model())
    for values, alive in world_pool(2).run(made, "fsdp", "model"):
        torch.testing.assert_close(values, wanted, rtol=0, atol=0)
        assert not alive


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_stored_weights_come_from_a_path(world_pool: Any, tmp_path: Path, strategy: str) -> None:
    wanted = named_tensors(Model())
    stored = Model().state_dict() | dict(wanted)
    # As the hub has them: tied ones once, under either name, and in half precision.
    hub = {n: t.detach().bfloat16() for n, t in stored.items() if n != "embedding.weight"}
    save_file({n: t for n, t in hub.items() if "scale" not in n}, tmp_path / "model.safetensors")
    found = world_pool(2).run(made, strategy, tmp_path)
    assert {name for values, _ in found for name in values} == wanted.keys()
    for values, _ in found:
        for name, value in values.items():
            expected = wanted[name] if "scale" in name else wanted[name].bfloat16().float()
            assert torch.equal(value, expected), name


def refusal(placement: Placement, build: Any, weights: Any) -> str:
    try:
        made(placement, "fsdp", weights, build)
    except (ConfigError, CheckpointError) as error:
        return str(error)
    return ""


def test_values_that_differ_between_ranks_are_refused(world_pool: Any) -> None:
    for said in world_pool(2).run(refusal, differing, "by_name"):
        assert "different initial values of blocks.0.norm.bias" in said


def test_what_cannot_be_is_refused_on_every_rank(world_pool: Any, tmp_path: Path) -> None:
    save_file({"other": torch.ones(3)}, tmp_path / "model.safetensors")
    for said in world_pool(2).run(refusal, Model, tmp_path):
        assert "do not fit this model" in said
    for said in world_pool(2).run(refusal, Model, tmp_path / "nothing"):
        assert "It does not exist" in said
    for said in world_pool(2).run(refusal, Model(), "by_name"):
        assert "Pass the function that builds it" in said
