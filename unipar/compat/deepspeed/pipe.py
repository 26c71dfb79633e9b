"""The pipeline engine, which is refused when it is imported."""

from __future__ import annotations

from unipar.compat.deepspeed_names import PIPE

__getattr__ = PIPE.refusing(__name__)
