"""The stages that differ least from others, at 2 ranks; ``make test-matrix`` adds 1 and 4."""

from __future__ import annotations

from unipar.testing.test_conformance import test_conformance

__all__ = ["test_conformance"]

STRATEGIES = ["deepspeed:stage=0", "zero1"]
WORLD_SIZES = (2,)
