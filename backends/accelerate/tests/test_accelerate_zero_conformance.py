"""Accelerate's DeepSpeed plugin trains the same run as the hand-written loop.

Every stage and world size is of the strategy 'deepspeed', and proved there; here is one stage, and
in brief. What Accelerate sets of a run besides is in test_accelerate_zero.py.
"""

from __future__ import annotations

import pytest

from unipar.testing.test_conformance import test_conformance

__all__ = ["test_conformance"]

STRATEGIES = ['accelerate:plugin=deepspeed,stage=3,deepspeed={"persistence_threshold":0}']
BRIEF = STRATEGIES
WORLD_SIZES = (2, 4)

pytestmark = pytest.mark.slow
