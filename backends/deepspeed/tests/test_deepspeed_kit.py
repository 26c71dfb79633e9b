"""DeepSpeed trains the same run as the hand-written loop, at 1, 2 and 4 ranks."""

from __future__ import annotations

from unipar.testing.test_conformance import test_conformance

__all__ = ["test_conformance"]

STRATEGIES = [
    *("deepspeed:stage=0", "zero1"),
    "zero2:offload_optimizer=true",
    "zero3:persistence_threshold=0,offload_optimizer=true,offload_parameters=true",
]
# The optimizer of zero2 is the one of zero1, which keeps its share on the host here. Stage 0
# divides nothing.
BRIEF = ["zero2:offload_optimizer=true", "deepspeed:stage=0"]
