"""The conformance kit, at 1, 2 and 4 ranks."""

from __future__ import annotations

from unipar.testing.test_conformance import test_conformance

__all__ = ["test_conformance"]

STRATEGIES = ["template"]
