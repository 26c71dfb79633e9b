"""A model that a user divides in parts himself trains as it would whole, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain import BATCH, batches, build, loss_fn
from test_options import largest_difference
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import unipar
from unipar.data.batch import Batch, MicroBatch
from unipar.errors import ConfigError
from unipar.strategy import ModelContext
from unipar.world import Placement, World


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=1e-2)


def own_units(model: Any, world: World) -> None:
    """Both halves of a block by themselves, and the head kept from forward to backward."""
    mesh = world.mesh("fsdp")
    for block in model.blocks:
        fully_shard(block.inner, mesh=mesh)
    fully_shard(model.head, mesh=mesh, reshard_after_forward=False)


def halved(model: Any, world: World) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach()[:, : model.head.in_features // 2])


def train(placement: Placement, model: Any) -> dict[str, Any]:
    told: list[ModelContext] = []

    def function(context: ModelContext) -> nn.Module:
        told.append(context)
        return build()

    with unipar.Session("fsdp", device="cpu", placement=placement) as session:
        engine = session.prepare(
            function if model is None else model,
            optimizer=adamw,
            max_grad_norm=0.5,
            parallelize=own_units,
        )
        losses = []
        share = BATCH // placement.size
        for inputs, targets in batches():
            own = slice(placement.rank * share, (placement.rank + 1) * share)
            part = MicroBatch((inputs[own], targets[own]), share)
            losses.append(engine.train_step(Batch((part,), BATCH), loss_fn).loss)
        named = engine.module.named_modules()
        return {
            "losses": losses,
            "units": [name for name, part in named if isinstance(part, FSDPModule)],
            "sharded": all(isinstance(p, DTensor) for p in engine.module.parameters()),
            "told": told,
        }


@pytest.mark.parametrize("model", [build(), None], ids=["a module", "a function"])
def test_parts_that_a_user_divides_train_the_same_run(world_pool: Any, model: Any) -> None:
    for found in world_pool(2).run(train, model):
        assert (model is None) == bool(found["told"])
        assert largest_difference(found["losses"]) < 1e-5
        assert found["sharded"]
        assert {"blocks.0.inner", "blocks.0", "head", ""} <= set(found["units"])
        for context in found["told"]:
            assert context.layout.dp_shard == 2
            assert (context.stage, context.device.type) == (0, "cpu")


def refused(placement: Placement, strategy: str, divide: Any) -> str:
    with (
        unipar.Session(strategy, device="cpu", placement=placement) as session,
        pytest.raises(ConfigError) as error,
    ):
        session.prepare(build(), optimizer=adamw, parallelize=divide)
    return str(error.value)


def test_parts_that_no_checkpoint_would_know_are_refused(world_pool: Any) -> None:
    for said in world_pool(2).run(refused, "fsdp", halved):
        assert "names or shapes of parameters: head.weight" in said
        assert "fully_shard" in said


def test_a_strategy_that_cannot_have_it_says_so(world_pool: Any) -> None:
    for said in world_pool(2).run(refused, "ddp", own_units):
        assert "strategy 'ddp'" in said
        assert "parallelize" in said
