"""Accelerate's DDP trains the same run as the hand-written loop, at 1, 2 and 4 ranks.

The kit's scheduler, clipping and accumulation are what Accelerate's own users stumble over.
"""

from __future__ import annotations

import pytest

from unipar.testing.test_conformance import test_conformance

__all__ = ["test_conformance"]

STRATEGIES = ["accelerate"]

pytestmark = pytest.mark.slow
