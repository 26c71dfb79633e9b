"""The host as Colossal-AI's accelerator: streams that ZeRO does not need, the host's generator.

Colossal-AI 0.5.0 (colossalai/accelerator/cpu_accelerator.py) raises for most of them, and gives
torch an argument that it does not take for ``get_rng_state``.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from colossalai.accelerator.cpu_accelerator import (  # pyright: ignore[reportMissingImports]
    CpuAccelerator,
)


class Host(CpuAccelerator):
    """The host as an accelerator: one stream, in order, so there is nothing to wait for."""

    def device_count(self) -> int:
        # Gemini's loss scaler asks, and does nothing with the answer.
        return 1

    def Stream(self, *args: Any, **kwargs: Any) -> None:
        return None

    def current_stream(self, *args: Any) -> None:
        return None

    def stream(self, stream_: None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)
