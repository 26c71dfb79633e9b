"""Colossal-AI's plugins train the same run as the hand-written loop, at 1, 2 and 4 ranks."""

from __future__ import annotations

import pytest

from unipar.testing.test_conformance import test_conformance

__all__ = ["test_conformance"]

STRATEGIES = [
    "colossalai:plugin=ddp",
    "colossalai:plugin=zero1",
    "colossalai:plugin=zero2",
    "colossalai:plugin=gemini",
    "colossalai:plugin=fsdp",
]
# The optimizer of zero2 is the one of zero1; ddp and fsdp are PyTorch's own, which are proved whole
# by themselves.
BRIEF = ["colossalai:plugin=zero2", "colossalai:plugin=ddp", "colossalai:plugin=fsdp"]

pytestmark = pytest.mark.slow
