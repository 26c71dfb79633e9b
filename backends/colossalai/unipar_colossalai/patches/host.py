"""``torch`` as one module of Colossal-AI sees it, where what it asks CUDA for is the host's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


class HostTorch:
    """``torch``, with functions of ``torch.cuda`` that answer for the host.

    Args:
        functions: those of ``torch.cuda`` that the module calls.
    """

    def __init__(self, **functions: Any) -> None:
        self.cuda = SimpleNamespace(**functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
