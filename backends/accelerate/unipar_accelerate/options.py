"""The options of Accelerate."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from unipar.errors import ConfigError, did_you_mean
from unipar.strategy import StrategyOptions

Plugin = Literal["ddp", "fsdp", "deepspeed"]

_NOT_OFFERED = {
    "tp": "Accelerate divides no layers: its ParallelismConfig(tp_size=…) takes a model that "
    "transformers has divided while loading it. Use 'mesh:tp=2', which divides a model as it is, "
    "or 'zero2:tp=2', DeepSpeed's",
    "cp": "Accelerate's ParallelismConfig(cp_size=…) needs its FSDP2, which on the CPU becomes "
    "plain DDP (1.15.0), so that no run of it could be compared with a plain loop. Use 'mesh:cp=2'",
    "sp": "Accelerate's ParallelismConfig(sp_size=…) is DeepSpeed's Ulysses, which is not proved "
    "here. Use 'mesh:cp=2,cp_kind=ulysses'",
    "pp": "Accelerate cuts models into stages for inference alone. Use 'mesh:pp=2'",
    "ep": "Accelerate divides no experts: its models come divided from transformers. Use "
    "'mesh:ep=2', which divides the experts of a model as it is",
}
"""Ways to divide a model or a batch that are not offered, why, and what to use."""


class AccelerateOptions(StrategyOptions):
    """Accelerate, and what its DDP, FSDP2 and DeepSpeed plugins let one tune."""

    strategy: ClassVar[str] = "accelerate"

    plugin: Plugin = Field(
        default="ddp",
        description="'ddp' keeps a replica on each device; 'fsdp' divides it (FSDP2), GPU only; "
        "'deepspeed' divides it by ZeRO.",
    )
    bucket_cap_mb: int = Field(
        default=25, ge=1, description="Size of a gradient bucket, in MiB; ddp only."
    )
    find_unused_parameters: bool = Field(
        default=False,
        description="Some parameters get no gradient in some steps; costs a graph walk; ddp only.",
    )
    static_graph: bool = Field(
        default=False, description="The graph is the same in every step; ddp only."
    )
    gradient_as_bucket_view: bool = Field(
        default=True,
        description="Gradients live in the communication buckets, which saves a copy; ddp only.",
    )
    broadcast_buffers: bool = Field(
        default=True,
        description="Every step starts from rank 0's buffers (BatchNorm statistics); ddp only.",
    )
    compression: Literal["none", "fp16", "bf16", "power_sgd"] = Field(
        default="none",
        description="Compression of gradients in the all-reduce, which loses precision; ddp only.",
    )
    reshard_after_forward: bool = Field(
        default=True,
        description="Free gathered parameters between forward and backward; fsdp only.",
    )
    wrap: Literal["auto", "none"] | tuple[str, ...] = Field(
        default="auto",
        description="What is gathered as a unit: the repeated blocks ('auto'), the whole model "
        "('none'), or modules of the named classes; fsdp only.",
    )
    cpu_offload: bool = Field(
        default=False,
        description="Shards, gradients and optimizer live in host memory between uses; fsdp only.",
    )
    stage: Literal[0, 1, 2, 3] = Field(
        default=2,
        description="What ZeRO divides: 0 nothing, 1 the optimizer's state, 2 gradients too, "
        "3 parameters too; deepspeed only.",
    )
    deepspeed: dict[str, Any] = Field(
        default_factory=dict,
        description="Further options of the strategy 'deepspeed' (offload_optimizer, …); "
        "deepspeed only.",
    )
    native: dict[str, Any] = Field(
        default_factory=dict,
        description="Further arguments: of Accelerator (log_with, project_dir), and of its "
        "DistributedDataParallelKwargs (comm_state_option, comm_wrapper, …).",
    )

    @model_validator(mode="before")
    @classmethod
    def _axes_are_offered(cls, given: Any) -> Any:
        for axis, why in _NOT_OFFERED.items():
            if isinstance(given, dict) and axis in given:
                raise ValueError(f"{axis}={given[axis]} cannot be had: {why}")
        return given

    @model_validator(mode="after")
    def _of_the_plugin(self) -> AccelerateOptions:
        for plugin, names in _ONLY.items():
            for name in sorted(self.model_fields_set & names if plugin != self.plugin else ()):
                raise ValueError(
                    f"{name} means nothing with plugin='{self.plugin}'. "
                    f"Set plugin='{plugin}', or leave it out"
                )
        if "stage" in self.deepspeed or "name" in self.deepspeed:
            raise ValueError("deepspeed holds further options; set the stage beside it, by stage")
        if self.deepspeed.get("tp", 1) != 1:
            tp = self.deepspeed["tp"]
            raise ValueError(
                f"tp={tp} is not proved where Accelerate calls DeepSpeed. Use "
                f"'deepspeed:stage={self.stage or 1},tp={tp}', or 'mesh:tp={tp}'"
            )
        return self


_ONLY: dict[Plugin, frozenset[str]] = {
    "ddp": frozenset(
        {
            *("bucket_cap_mb", "find_unused_parameters", "static_graph", "compression"),
            *("gradient_as_bucket_view", "broadcast_buffers"),
        }
    ),
    "fsdp": frozenset({"reshard_after_forward", "wrap", "cpu_offload"}),
    "deepspeed": frozenset({"stage", "deepspeed"}),
}
"""The options that mean something under one plugin."""

ACCELERATOR_KEYS = frozenset({"log_with", "project_dir"})
DDP_KEYS = frozenset({"check_reduction", "comm_state_option", "comm_wrapper", "dim"})

_OWNED = {
    **{name: f"the option '{name}'" for name in sorted(_ONLY["ddp"] | _ONLY["fsdp"])},
    "comm_hook": "the option 'compression'",
    "auto_wrap_policy": "the option 'wrap'",
    "transformer_cls_names_to_wrap": "the option 'wrap'",
    "min_num_params": "the option 'wrap'",
    "fsdp_plugin": "the option 'plugin'",
    "fsdp_version": "the option 'plugin'",
    "deepspeed_plugin": "the option 'plugin'",
    "deepspeed_plugins": "the option 'plugin'",
    "parallelism_config": "the strategy: 'mesh' divides layers and sequences",
    "torch_tp_plugin": "the strategy: 'mesh:tp=2' divides layers",
    "megatron_lm_plugin": "the strategy: 'mesh' divides layers and cuts stages",
    "kwargs_handlers": "this strategy's options",
    "cpu": "the run's device",
    "mixed_precision": "the run's precision",
    "mixed_precision_policy": "the run's precision",
    "dynamo_backend": "the run's compile",
    "dynamo_plugin": "the run's compile",
    "activation_checkpointing": "the run's activation_checkpointing",
    "gradient_accumulation_steps": "the run's global_batch_size and micro_batch_size",
    "gradient_accumulation_plugin": "the run's global_batch_size and micro_batch_size",
    "split_batches": "the run's global_batch_size and micro_batch_size",
    "step_scheduler_with_optimizer": "unipar, which steps the scheduler once a step",
    "dataloader_config": "unipar, which loads the data",
    "rng_types": "unipar, which seeds the data's order",
}
"""Accelerate's arguments that follow from another place, and which."""


def check_native(options: AccelerateOptions) -> None:
    """Refuse native arguments that unipar sets itself, or that Accelerate does not have.

    Raises:
        ConfigError: it names both places.
    """
    allowed = ACCELERATOR_KEYS | (DDP_KEYS if options.plugin == "ddp" else frozenset())
    for key in options.native:
        if key in _OWNED:
            raise ConfigError(
                f"accelerate: native sets '{key}', which follows from {_OWNED[key]}. "
                "Set it there, and leave it out of native."
            )
        if key not in allowed:
            raise ConfigError(
                f"accelerate: native sets '{key}', which is not taken with "
                f"plugin='{options.plugin}'.{did_you_mean(key, allowed)} "
                f"Allowed: {', '.join(sorted(allowed))}."
            )
