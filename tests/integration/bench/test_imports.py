"""What a call of ``fit`` may not import before it starts its workers, which would wait for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Each takes about as long to import as torch, and only workers need it.
SLOW = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy")

PROGRAM = """
import sys
from unipar import RunConfig, Session

def slow():
    return [name for name in {slow!r} if name in sys.modules]

for strategy in ("auto", "single", "ddp", "fsdp"):
    Session(strategy=strategy, device="cpu")
    print(strategy, slow())
RunConfig.build(
    optimizer={{"name": "adamw", "lr": 0.1}},
    lr_scheduler={{"name": "onecyclelr", "max_lr": 0.1, "total_steps": 10}},
)
print("config", slow())
"""


@pytest.mark.usefixtures("new_interpreters")
def test_what_comes_before_the_workers_imports_nothing_slow() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(slow=SLOW)],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert done.stdout.splitlines() == [
        f"{what} []" for what in ("auto", "single", "ddp", "fsdp", "config")
    ]
