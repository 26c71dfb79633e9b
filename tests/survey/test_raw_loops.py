"""The hand-written loops train what unipar trains; run where their frameworks are."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unipar.benchmark.api import bench
from unipar.strategy import registry

LOOPS = Path(__file__).resolve().parents[2] / "measure" / "raw"
STRATEGIES = {
    loop: strategy
    for loop, strategy in (
        ("ddp", "ddp"),
        ("fsdp", "fsdp"),
        ("deepspeed", "deepspeed:stage=2"),
        ("zero1", "zero1"),
        ("zero3", "zero3"),
        ("horovod", "horovod"),
    )
    if loop in registry.names()
}


def loss(model: Any, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


@pytest.mark.parametrize("path", sorted(LOOPS.glob("*.py")), ids=lambda path: path.stem)
def test_they_know_nothing_of_unipar(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
        assert not [name for name in names if name.startswith("unipar")]


@pytest.mark.extra
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_they_have_the_same_losses_and_a_ratio_beside_them(tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="this environment lends its frameworks, and reports none")
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    result = bench(
        model,
        (torch.randn(64, 8, generator=generator), torch.randn(64, 2, generator=generator)),
        strategies=list(STRATEGIES.values()),
        devices=[2],
        loss=loss,
        optimizer={"name": "adamw", "lr": 0.01},
        lr_scheduler={"name": "steplr", "step_size": 2},
        max_grad_norm=0.1,
        global_batch_size=16,
        # Two micro-batches on each rank.
        micro_batch_size=4,
        steps=4,
        warmup=1,
        repeats=1,
        raw=LOOPS,
        output_dir=tmp_path / "out",
    )
    apart = {}
    for one in result.cells:
        assert one.status == "measured", f"{one.cell.label}: {one.reason}"
        assert one.parity is not None
        apart[one.cell.label] = one.parity.difference
        if not one.cell.raw:
            # Horovod sends by means of its own, which the profiler does not see.
            seen = all(rank.overlap for trial in one.trials for rank in trial.ranks)
            assert seen == (one.cell.strategy != "horovod"), one.cell.label
    assert len(apart) == 2 * len(STRATEGIES)
    assert max(apart.values()) < 1e-5, apart
    assert {one.label.partition(" (")[0] for one in result.overhead} == set(STRATEGIES.values())
    assert all(math.isfinite(one.ratio.median) for one in result.overhead)
