"""ZeRO stage 1 by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from measure.raw import deepspeed


def train(job: Mapping[str, Any]) -> None:
    """Train the job on all ranks."""
    deepspeed.train({**job, "options": {"stage": 1, **job["options"]}})
