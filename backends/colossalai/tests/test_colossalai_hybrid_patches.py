"""What HybridParallelPlugin needs changed on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from colossalai_llama import adamw, llama

from unipar import registry
from unipar.batch import Batch, MicroBatch
from unipar.loss import model_output_loss
from unipar.strategy import EngineSpec
from unipar.testing.pool import WorldPools
from unipar.world import Placement
from unipar_colossalai import patches

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("left_out", "sizes", "said"),
    [
        ("stages-on-cpu", "pp_size=2", "has no attribute 'is_hccl_available'"),
        ("stages-on-cpu", "tp_size=2", "it runs"),
        ("", "pp_size=2", "it runs"),
    ],
)
def test_without_each_change_a_step_fails(
    left_out: str, sizes: str, said: str, world_pool: WorldPools
) -> None:
    for of_rank in world_pool(2).run(step_without, left_out, sizes):
        assert said in of_rank


def step_without(placement: Placement, left_out: str, sizes: str) -> str:
    kept = patches.ALL
    patches.ALL = tuple(patch for patch in kept if patch.name != left_out)
    strategy = registry.resolve(f"colossalai:plugin=hybrid,{sizes}")
    world = strategy.setup(placement)
    try:
        engine = strategy.prepare(EngineSpec(llama(), adamw), world)
        tokens = torch.arange(16).reshape(2, 8) % 11
        batch = Batch((MicroBatch({"input_ids": tokens, "labels": tokens}, 2),), 2)
        engine.train_step(batch, model_output_loss)
    except AttributeError as error:
        return str(error)
    finally:
        patches.ALL = kept
        strategy.teardown()
        world.leave()
    return "it runs"


def test_without_the_hosts_generator_a_layer_cannot_be_divided(world_pool: WorldPools) -> None:
    assert "takes 0 positional arguments" in world_pool(1).run(generator_of_the_host)[0]


def generator_of_the_host(placement: Placement) -> str:
    from unipar_colossalai.framework import load

    load()
    from colossalai.accelerator.cpu_accelerator import (  # pyright: ignore[reportMissingImports]
        CpuAccelerator,
    )

    try:
        CpuAccelerator().get_rng_state()
    except TypeError as error:
        return str(error)
    return "it can"


def test_teardown_leaves_colossalai_as_it_was(world_pool: WorldPools) -> None:
    before, during, after = world_pool(2).run(set_up_and_tear_down)[0]
    assert before == after != during


def set_up_and_tear_down(placement: Placement) -> tuple[Any, Any, Any]:
    from unipar_colossalai.framework import load

    load()
    import colossalai.pipeline.p2p as p2p  # pyright: ignore[reportMissingImports]

    def seen() -> int:
        return id(p2p._check_for_nccl_hccl_backend)

    before = seen()
    strategy = registry.resolve("colossalai:plugin=hybrid,tp_size=2")
    world = strategy.setup(placement)
    during = seen()
    strategy.teardown()
    world.leave()
    return before, during, seen()


@pytest.mark.parametrize(
    ("device_type", "names"),
    [("cpu", ["stages-on-cpu"]), ("cuda", [])],
)
def test_a_run_gets_only_what_it_needs(device_type: str, names: list[str]) -> None:
    assert [p.name for p in patches.ALL if p.needed(device_type, "hybrid")] == names
