"""Facts about a job's model: its size, and the floating-point operations of a training step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from unipar.benchmark.cells import REFERENCE, Cell
from unipar.benchmark.job import BenchJob
from unipar.callbacks import Callback, RunInfo
from unipar.data import batch_size_of

_SAMPLES = 8
"""At most so many are counted, for a step needs no more memory then than it must."""


class Model(BaseModel):
    """A model, as it is without a framework.

    Attributes:
        name: its class.
        parameters: its elements.
        flops_per_sample: floating-point operations of a forward and a backward pass: those of
            matrix products, convolutions and attention (:mod:`torch.utils.flop_counter`).
    """

    name: str
    parameters: int
    flops_per_sample: float


def answer(job: BenchJob, directory: Path, request: dict[str, Any]) -> Model:
    """Look at it, and count one step on a few samples, without recomputation and compilation."""
    from unipar.train.fit import fit

    size = job.arguments.get("global_batch_size") or batch_size_of(job.arguments["data"])
    samples = min(_SAMPLES, size or _SAMPLES)
    arguments = job.of(
        Cell(strategy=REFERENCE),
        1,
        global_batch_size=samples,
        activation_checkpointing="off",
        activation_offload=False,
        compile=False,
        output_dir=directory / "run",
        callbacks=[look := _Look()],
    )
    # The counter has no formula for the CPU's fused attention, whose parts it knows.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        fit(**arguments)
    return Model(
        name=look.name,
        parameters=look.parameters,
        flops_per_sample=counter.get_total_flops() / samples,
    )


class _Look(Callback):
    name, parameters = "", 0

    def on_run_start(self, run: RunInfo) -> None:
        assert run.engine is not None
        self.name, self.parameters = type(run.engine.module).__name__, run.num_parameters
