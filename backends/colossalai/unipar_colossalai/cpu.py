"""The host as Colossal-AI's accelerator, with the streams that ZeRO names and does not need.

Colossal-AI 0.5.0 (colossalai/accelerator/cpu_accelerator.py) raises for all of them.
"""

from __future__ import annotations

import contextlib
from typing import Any

from colossalai.accelerator.cpu_accelerator import (  # pyright: ignore[reportMissingImports]
    CpuAccelerator,
)


class Host(CpuAccelerator):
    """What the host does, it does in order: there is one stream, and nothing to wait for."""

    def Stream(self, *args: Any, **kwargs: Any) -> None:
        return None

    def current_stream(self, *args: Any) -> None:
        return None

    def stream(self, stream_: None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()
