"""The plugins that differ least from others, at 2 ranks; ``make test-matrix`` adds 1 and 4."""

from __future__ import annotations

import pytest

from unipar.testing.test_conformance import test_conformance

__all__ = ["test_conformance"]

STRATEGIES = ["colossalai:plugin=ddp", "colossalai:plugin=zero1"]
WORLD_SIZES = (2,)

pytestmark = pytest.mark.slow
