"""What the kit does not ask, since it is this backend's own."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from unipar.engine.checks import check_capabilities
from unipar.errors import ConfigError
from unipar.strategy import EngineSpec, registry
from unipar.testing.cases.numbers import equals_the_reference
from unipar.testing.kit import Kit, Target
from unipar.world import Placement


def test_gradients_may_take_several_reductions(world_pool: Any) -> None:
    equals_the_reference.check(Kit(Target.named("template:bucket_mb=0.0005"), 2, world_pool))


def first_weights(placement: Placement) -> list[float]:
    strategy = registry.resolve("template")
    world = strategy.setup(placement)
    torch.manual_seed(placement.rank)
    model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    model.register_buffer("drawn", torch.rand(3))
    engine = strategy.prepare(EngineSpec(model), world)
    weights = [float(tensor.sum()) for tensor in engine.module.state_dict().values()]
    world.leave()
    return weights


def test_every_rank_begins_with_the_weights_and_buffers_of_the_first(world_pool: Any) -> None:
    first, second = world_pool(2).run(first_weights)
    assert first == second


def test_several_gpus_without_nccl_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    strategy, spec = registry.resolve("template"), EngineSpec(nn.Linear(2, 1))
    strategy.check(spec, Placement(size=1, device_type="cuda"))
    with pytest.raises(ConfigError, match=r"2 GPUs were asked for.*built without it"):
        check_capabilities(strategy, spec, Placement(size=2, device_type="cuda"))


def test_it_is_found_here_and_nowhere_else() -> None:
    assert registry.strategy_class("template").availability().ok
    elsewhere = (
        "from importlib import metadata; import sys; "
        f"sys.exit('template' in metadata.entry_points(group={registry.GROUP!r}).names)"
    )
    subprocess.run([sys.executable, "-c", elsewhere], check=True, timeout=60)
