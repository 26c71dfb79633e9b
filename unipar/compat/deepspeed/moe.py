"""Mixtures of experts, which are refused when they are imported."""

from __future__ import annotations

from unipar.compat.deepspeed_names import MOE

__getattr__ = MOE.refusing(__name__)
