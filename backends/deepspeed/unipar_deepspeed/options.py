"""The options of DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from unipar.strategy import StrategyOptions
from unipar_deepspeed.axes import check_tensor_parallel, refuse_axes

Stage = Literal[0, 1, 2, 3]


class ZeROOptions(StrategyOptions):
    """Options that every stage has."""

    tp: int = Field(
        default=1,
        ge=1,
        description="Ranks that divide each layer of a model of transformers, on the same samples "
        "(AutoTP); from stage 1 on.",
    )
    overlap_comm: bool = Field(
        default=False,
        description="Reduce gradients while the backward pass goes on; GPU only.",
    )
    reduce_bucket_size: int = Field(
        default=50_000_000,
        gt=0,
        description="Elements that are reduced at once; never more than the model has.",
    )
    allgather_bucket_size: int = Field(
        default=50_000_000,
        gt=1,
        multiple_of=2,
        description="Elements that are gathered at once after a step, in stages 1 and 2.",
    )
    contiguous_gradients: bool = Field(
        default=True, description="Copy gradients into one buffer as they are produced."
    )
    round_robin_gradients: bool = Field(
        default=False,
        description="Deal gradients out to the ranks in turn, in stages 1 and 2; for offloading.",
    )
    offload_optimizer: bool = Field(
        default=False,
        description="Optimizer state and update in host memory, from stage 1 on.",
    )
    offload_parameters: bool = Field(
        default=False, description="Parameters in host memory between uses; stage 3 only."
    )
    nvme_path: Path | None = Field(
        default=None,
        description="A directory on a local drive: what is offloaded lies there instead of in "
        "host memory; stage 3 only.",
    )
    pin_memory: bool = Field(
        default=False, description="Offload into page-locked memory: faster, and not pageable."
    )
    prefetch_bucket_size: int = Field(
        default=50_000_000, ge=0, description="Elements gathered ahead of their use, in stage 3."
    )
    persistence_threshold: int = Field(
        default=100_000,
        ge=0,
        description="Parameters of fewer elements are kept whole on every rank, in stage 3.",
    )
    max_live_parameters: int = Field(
        default=1_000_000_000,
        ge=0,
        description="Elements that may be whole at a time on a rank, in stage 3.",
    )
    sub_group_size: int = Field(
        default=1_000_000_000,
        gt=0,
        description="Elements that the optimizer updates at a time, in stage 3.",
    )
    unused_parameters: Literal["refuse", "zero_gradient"] = Field(
        default="refuse",
        description="What to do where no rank has used a trainable parameter in a step: stop, or "
        "give it a gradient of zero, by which AdamW decays it (stages 1 and 2, not offloaded).",
    )
    native: dict[str, Any] = Field(
        default_factory=dict,
        description="Further keys of DeepSpeed's own configuration, merged into what unipar makes.",
    )

    @model_validator(mode="before")
    @classmethod
    def _axes_are_offered(cls, given: Any) -> Any:
        if isinstance(given, dict):
            refuse_axes(given)
        return given


class DeepSpeedOptions(ZeROOptions):
    """DeepSpeed, with the stage of ZeRO that is wanted.

    Stage 0 keeps everything on every rank; 1 divides the optimizer's state among ranks, 2 gradients
    too, and 3 parameters too.
    """

    strategy: ClassVar[str] = "deepspeed"

    stage: Stage = Field(default=2, description="What ZeRO divides: 0 nothing, 1, 2, 3 all.")

    @model_validator(mode="after")
    def _stage_can(self) -> DeepSpeedOptions:
        check_stage(self, self.stage)
        return self


class ZeRO1Options(ZeROOptions):
    """ZeRO stage 1: the optimizer's state is divided among ranks."""

    strategy: ClassVar[str] = "zero1"
    stage: ClassVar[Stage] = 1

    @model_validator(mode="after")
    def _stage_can(self) -> ZeRO1Options:
        check_stage(self, self.stage)
        return self


class ZeRO2Options(ZeROOptions):
    """ZeRO stage 2: gradients and the optimizer's state are divided among ranks."""

    strategy: ClassVar[str] = "zero2"
    stage: ClassVar[Stage] = 2

    @model_validator(mode="after")
    def _stage_can(self) -> ZeRO2Options:
        check_stage(self, self.stage)
        return self


class ZeRO3Options(ZeROOptions):
    """ZeRO stage 3: parameters, gradients and the optimizer's state are divided among ranks."""

    strategy: ClassVar[str] = "zero3"
    stage: ClassVar[Stage] = 3

    @model_validator(mode="after")
    def _stage_can(self) -> ZeRO3Options:
        check_stage(self, self.stage)
        return self


AnyOptions = DeepSpeedOptions | ZeRO1Options | ZeRO2Options | ZeRO3Options

_FROM_STAGE = {
    "overlap_comm": 1,
    "contiguous_gradients": 1,
    "round_robin_gradients": 1,
    "offload_optimizer": 1,
    "unused_parameters": 1,
    "offload_parameters": 3,
    "nvme_path": 3,
    "prefetch_bucket_size": 3,
    "persistence_threshold": 3,
    "max_live_parameters": 3,
    "sub_group_size": 3,
}
"""The stage that an option begins to mean something in."""

_LARGEST_KEPT = 2**18
"""Elements up to which no parameter is swapped on any number of ranks: 1 MiB in fp32
(DeepSpeed 0.19.8, ``swap_tensor/utils.py``, ``MIN_SWAPPABLE_BYTES``)."""


def check_stage(options: ZeROOptions, stage: int) -> None:
    """Refuse options that mean nothing in a stage, or without another.

    Raises:
        ValueError: one was set.
    """
    check_tensor_parallel(options, stage)
    for name in sorted(options.model_fields_set & _FROM_STAGE.keys()):
        if stage < _FROM_STAGE[name]:
            raise ValueError(
                f"{name} means nothing in ZeRO stage {stage}; "
                f"it is of stage {_FROM_STAGE[name]}{'' if _FROM_STAGE[name] == 3 else ' and up'}. "
                f"Set stage={_FROM_STAGE[name]}, or leave it out"
            )
    if options.unused_parameters == "zero_gradient" and (stage == 3 or options.offload_optimizer):
        raise ValueError(
            "unused_parameters='zero_gradient' cannot be had in stage 3 or with offload_optimizer, "
            "where DeepSpeed would use gradients of an earlier step. Leave it out, and freeze "
            "parameters that are not used"
        )
    if options.nvme_path is not None and not options.offload_optimizer:
        raise ValueError(
            "nvme_path is where offloaded optimizer state lies, and nothing is offloaded. "
            "Set offload_optimizer=true too"
        )
    if (
        options.nvme_path is not None
        and options.offload_parameters
        and options.persistence_threshold > _LARGEST_KEPT
    ):
        raise ValueError(
            f"persistence_threshold={options.persistence_threshold} keeps parameters in memory "
            "that nvme_path puts into files. "
            f"Set persistence_threshold={_LARGEST_KEPT}, or less"
        )
