"""What only a GPU can show of Accelerate, FSDP2 above all; run with ``pytest -m gpu``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unipar import checkpoint
from unipar.data.batch import Batch, MicroBatch
from unipar.state import is_dtensor
from unipar.strategy import EngineSpec, Precision, registry
from unipar.world import Placement

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none"),
]

FSDP = "accelerate:plugin=fsdp"
STRATEGIES = ["accelerate", FSDP, f"{FSDP},cpu_offload=true", f"{FSDP},wrap=none"]


def build() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Linear(4, 8), nn.Sequential(*blocks), nn.Linear(8, 2))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 4, generator=generator), torch.randint(0, 2, (8,), generator=generator))
        for _ in range(10)
    ]


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def reference(dtype: torch.dtype) -> list[float]:
    """The plain loop on the GPU; nothing of unipar in it."""
    model = build().cuda()
    optimizer = adamw(model.parameters())
    losses = []
    for inputs, targets in batches():
        with torch.autocast("cuda", dtype, enabled=dtype is not torch.float32):
            loss = nn.functional.cross_entropy(model(inputs.cuda()), targets.cuda())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def prepared(strategy: str, precision: Precision = "fp32") -> tuple[Any, Any, Any]:
    found = registry.resolve(strategy)
    world = found.setup(Placement(device_type="cuda"))
    spec = EngineSpec(
        build(),
        optimizer=lambda named: adamw(p for _, p in named),
        precision=precision,
        max_grad_norm=0.5,
    )
    return found, world, found.prepare(spec, world)


def train(engine: Any) -> list[float]:
    return [engine.train_step(Batch((MicroBatch(pair, 8),), 8), loss_fn).loss for pair in batches()]


def leave(strategy: Any, world: Any, engine: Any) -> None:
    engine.close()
    strategy.teardown()
    world.leave()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fp32_equals_the_plain_loop(strategy: str) -> None:
    found, world, engine = prepared(strategy)
    losses = train(engine)
    sharded = all(is_dtensor(p) for p in engine.module.parameters())
    leave(found, world, engine)
    assert losses == pytest.approx(reference(torch.float32), rel=1e-5)
    assert sharded is ("fsdp" in strategy)


@pytest.mark.parametrize("strategy", ["accelerate", FSDP, f"{FSDP},cpu_offload=true"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_stays_as_near_as_autocast(strategy: str, precision: Precision) -> None:
    found, world, engine = prepared(strategy, precision)
    losses = torch.tensor(train(engine))
    leave(found, world, engine)
    exact = torch.tensor(reference(torch.float32))
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    allowed = 4 * ((torch.tensor(reference(dtype)) - exact) / exact).abs().max()
    assert ((losses - exact) / exact).abs().max() <= allowed


@pytest.mark.parametrize("strategy", ["accelerate", FSDP])
def test_a_checkpoint_goes_on_under_single(strategy: str, tmp_path: Path) -> None:
    found, world, engine = prepared(strategy)
    train(engine)
    path = checkpoint.save(tmp_path, {"model": engine}, world, step=len(batches()))
    on = train(engine)
    leave(found, world, engine)
    found, world, engine = prepared("single")
    checkpoint.load(path, {"model": engine}, world)
    assert train(engine) == pytest.approx(on, rel=1e-5)
    leave(found, world, engine)
