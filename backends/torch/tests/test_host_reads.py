"""How often a step makes the host wait for the device, by the reads of tensors on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unipar.testing.host_reads import reads_of_a_step
from unipar.testing.pool import WorldPools

LOSS = {"processes.wait": 1}
"""The loss of the step, on its way since before the last backward pass."""
LAST_NORM = {"last_step.check": 1}
"""The norm of the last step, which was computed before this loss."""


def fused(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=1e-3, fused=True)


def plain(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=1e-3)


STRATEGIES = [
    "single",
    "ddp",
    "ddp:find_unused_parameters=true",
    "ddp:shard_optimizer=true",
    "fsdp",
]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_reads_its_loss_and_no_more_than_it_must(
    world_pool: WorldPools, strategy: str
) -> None:
    clips = {"max_grad_norm": 1.0}
    norm = {"stepper.step": 1}
    takes_a_flag = strategy != "ddp:shard_optimizer=true"
    asked = [
        (fused, {}, LOSS),
        (fused, clips, LOSS | (LAST_NORM if takes_a_flag else norm)),
        (fused, {**clips, "precision": "bf16"}, LOSS | (LAST_NORM if takes_a_flag else norm)),
        (fused, {**clips, "on_nan": "ignore"}, LOSS),
        (plain, clips, LOSS | norm),
        (plain, {**clips, "precision": "fp16"}, LOSS | {"precision.step": 1}),
    ]
    pool = world_pool(1 if strategy == "single" else 2)
    for optimizer, settings, expected in asked:
        for found in pool.run(_reads, strategy, optimizer, settings):
            assert found == expected, settings


def _reads(placement: Any, strategy: str, optimizer: Any, settings: dict[str, Any]) -> Any:
    return reads_of_a_step(placement, strategy, optimizer, **settings)
