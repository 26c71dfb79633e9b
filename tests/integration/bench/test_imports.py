"""What a call of ``fit`` may not import before it starts its workers, which would wait for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Each takes about as long to import as torch, and only workers need it.
SLOW = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy")


@pytest.mark.parametrize("strategy", ["auto", "ddp", "fsdp", "single"])
def test_choosing_a_strategy_imports_nothing_slow(strategy: str) -> None:
    code = (
        "import sys\n"
        "from unipar import Session, fit\n"
        f"Session(strategy={strategy!r}, device='cpu')\n"
        f"print([name for name in {SLOW!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout == "[]\n"
