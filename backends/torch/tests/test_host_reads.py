"""How often a step makes the host wait for the device, by the reads of tensors on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unipar.testing.host_reads import CLIPS, fused, plain, reads_of_a_step, row_of
from unipar.testing.pool import WorldPools
from unipar.world import Placement

PAGE = Path(__file__).parents[3] / "docs" / "gpu.md"
LOSS, LAST_NORM = {"processes.wait": 1}, {"last_step.check": 1}


@pytest.mark.parametrize(
    "strategy",
    ["single", "ddp", "ddp:find_unused_parameters=true", "ddp:shard_optimizer=true", "fsdp"],
)
def test_the_docs_say_how_often_a_step_reads(world_pool: WorldPools, strategy: str) -> None:
    assert row_of(world_pool(1 if strategy == "single" else 2), strategy) in PAGE.read_text()


@pytest.mark.parametrize(
    ("optimizer", "settings", "expected"),
    [
        (plain, {}, LOSS),
        (fused, {**CLIPS, "precision": "bf16"}, LOSS | LAST_NORM),
        (fused, {**CLIPS, "precision": "fp16"}, LOSS | {"precision.has_overflowed": 1}),
        (fused, {**CLIPS, "on_nan": "skip"}, LOSS | {"step._update": 1}),
        (plain, {**CLIPS, "on_nan": "skip"}, LOSS | {"stepper.step": 1}),
        (plain, {**CLIPS, "on_nan": "ignore"}, LOSS),
    ],
)
def test_what_reads_is_known(optimizer: Any, settings: dict[str, Any], expected: Any) -> None:
    assert reads_of_a_step(Placement(), "single", optimizer, **settings) == expected
