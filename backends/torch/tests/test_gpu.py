"""What only a GPU can show; run with ``pytest -m gpu`` where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plain import BATCH, batches, build, loss_fn
from torch import nn

from unipar import checkpoint, registry
from unipar.batch import Batch, MicroBatch
from unipar.strategy import EngineSpec, Precision
from unipar.world import Placement

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none"),
]

STRATEGIES = ["single", "dp", "ddp", "fsdp", "fsdp:cpu_offload=true"]


def reference(dtype: torch.dtype) -> list[float]:
    """The plain loop on the GPU; nothing of unipar in it."""
    model = build().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for inputs, targets in batches():
        with torch.autocast("cuda", dtype, enabled=dtype is not torch.float32):
            loss = nn.functional.cross_entropy(model(inputs.cuda()), targets.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def prepared(strategy: str, precision: Precision = "fp32", **adamw: Any) -> tuple[Any, Any]:
    found = registry.resolve(strategy)
    world = found.setup(Placement(device_type="cuda"))
    spec = EngineSpec(
        build(),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2, **adamw),
        precision=precision,
    )
    return found.prepare(spec, world), world


def train(engine: Any) -> list[float]:
    return [
        engine.train_step(Batch((MicroBatch(pair, BATCH),), BATCH), loss_fn).loss
        for pair in batches()
    ]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fp32_equals_the_plain_loop(strategy: str) -> None:
    engine, world = prepared(strategy)
    losses = train(engine)
    world.leave()
    assert losses == pytest.approx(reference(torch.float32), rel=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_stays_as_near_as_autocast(strategy: str, precision: Precision) -> None:
    engine, world = prepared(strategy, precision)
    losses = torch.tensor(train(engine))
    world.leave()
    exact = torch.tensor(reference(torch.float32))
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    allowed = 4 * ((torch.tensor(reference(dtype)) - exact) / exact).abs().max()
    assert ((losses - exact) / exact).abs().max() <= allowed


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_fused_optimizer_state_survives_a_checkpoint(strategy: str, tmp_path: Path) -> None:
    engine, world = prepared(strategy, fused=True)
    train(engine)
    path = checkpoint.save(tmp_path, {"model": engine}, world, step=len(batches()))
    on = train(engine)
    world.leave()
    again, world = prepared("single", fused=True)
    checkpoint.load(path, {"model": again}, world)
    assert train(again) == pytest.approx(on, rel=1e-5)
    world.leave()
