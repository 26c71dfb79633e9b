"""The floating-point operations of a job's training step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from unipar.benchmark.cells import REFERENCE, Cell
from unipar.benchmark.job import BenchJob
from unipar.data import batch_size_of

_SAMPLES = 8
"""At most so many are counted, for a step needs no more memory then than it must."""


class Flops(BaseModel):
    """What a sample takes.

    Attributes:
        per_sample: floating-point operations of its forward and backward pass, those of matrix
            products, convolutions and attention: what :mod:`torch.utils.flop_counter` knows.
    """

    per_sample: float


def answer(job: BenchJob, directory: Path, request: dict[str, Any]) -> Flops:
    """Count one step on a few samples, without recomputation and compilation."""
    import unipar

    size = job.arguments.get("global_batch_size") or batch_size_of(job.arguments["data"])
    samples = min(_SAMPLES, size or _SAMPLES)
    arguments = job.of(
        Cell(strategy=REFERENCE),
        1,
        global_batch_size=samples,
        activation_checkpointing="off",
        compile=False,
        output_dir=directory / "run",
    )
    # The counter has no formula for the CPU's fused attention, whose parts it knows.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        unipar.fit(**arguments)
    return Flops(per_sample=counter.get_total_flops() / samples)
