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
# Its optimizer is the one of zero1.
BRIEF = ["colossalai:plugin=zero2"]

pytestmark = pytest.mark.slow
