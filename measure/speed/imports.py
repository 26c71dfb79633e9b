"""What importing costs beside ``import torch``, each time in a fresh process."""

from __future__ import annotations

import subprocess
import sys
import tempfile

from measure.report import Row, whole_seconds
from measure.speed.timing import BASELINE, in_turns

AIM = "`import torch, unipar`"
STATEMENTS = {
    BASELINE: "import torch",
    AIM: "import torch, unipar",
    "`from unipar import fit, Session`": "from unipar import fit, Session",
    "`from lightning_fabric import Fabric`": "from lightning_fabric import Fabric",
    "`from accelerate import Accelerator`": "from accelerate import Accelerator",
}


def measure(*, quick: bool) -> list[Row]:
    turns = 2 if quick else 11
    measured = in_turns(
        {name: lambda text=text: seconds_of(text) for name, text in STATEMENTS.items()}, turns
    )
    return [
        Row.timed(
            f"{name} beside `import torch`",
            values,
            measured[BASELINE],
            whole_seconds,
            1.05 if name == AIM else None,
        )
        for name, values in measured.items()
        if name != BASELINE
    ]


def seconds_of(statement: str) -> float:
    """Seconds that a statement takes in a new interpreter, whose own start does not count."""
    code = (
        f"from time import perf_counter; began = perf_counter(); {statement}; "
        "print(perf_counter() - began)"
    )
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=empty, capture_output=True, text=True, check=True
        )
    return float(done.stdout.split()[-1])
