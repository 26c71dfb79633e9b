"""A strategy to copy: a whole replica on each process, gradients summed by all-reduce.

Importing this module must not import the framework: `unipar doctor` looks at every strategy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch.distributed as dist
from pydantic import Field

from unipar.errors import ConfigError
from unipar.strategy import Availability, Capabilities, EngineSpec, Strategy, StrategyOptions
from unipar.world import Placement, World

if TYPE_CHECKING:
    from unipar.engine import StepEngine


class TemplateOptions(StrategyOptions):
    """Options of the framework; pydantic refuses unknown names and wrong values."""

    strategy: ClassVar[str] = "template"

    bucket_mb: float = Field(
        default=25.0, gt=0, description="Size of what is reduced by one all-reduce, in MiB."
    )


class TemplateStrategy(Strategy):
    """All-reduces of `torch.distributed`, once the last backward pass of a step is through."""

    name = "template"
    options_type = TemplateOptions
    options: TemplateOptions

    @classmethod
    def availability(cls) -> Availability:
        # Of a framework: importlib.util.find_spec, and its version from importlib.metadata.
        if not dist.is_available():
            return Availability(
                False,
                "this PyTorch is built without torch.distributed.",
                "install another build: https://pytorch.org/get-started/locally",
            )
        return Availability(ok=True)

    def capabilities(self) -> Capabilities:
        return Capabilities(
            precisions=frozenset({"fp32", "bf16", "fp16"}),
            device_types=frozenset({"cpu", "cuda"}),
            offload=frozenset({"activations"}),
            selective_checkpointing=True,
            sparse_gradients=False,
            sample_dropout=True,
        )

    def check(self, spec: EngineSpec, placement: Placement) -> None:
        # Both of the run and the environment, so no capability.
        if placement.device_type == "cuda" and placement.size > 1 and not dist.is_nccl_available():
            raise ConfigError(
                f"template: {placement.size} GPUs were asked for, whose gradients NCCL sums, and "
                "this PyTorch is built without it. Use device='cpu', one device, or a build of "
                "PyTorch with NCCL."
            )

    def prepare(self, spec: EngineSpec, world: World) -> StepEngine:
        # What imports the framework is imported here.
        from unipar_template.engine import make_engine

        return make_engine(spec, world, self.options)
