"""The options of the strategy: one plugin of Colossal-AI's Booster, and what it lets one tune."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from unipar.errors import ConfigError, did_you_mean
from unipar.strategy import StrategyOptions

Plugin = Literal["ddp", "zero1", "zero2", "gemini", "fsdp", "hybrid"]
ZERO: frozenset[str] = frozenset({"zero1", "zero2"})

_NOT_OFFERED = {
    "moe": "its expert parallelism is not proved. Use plugin='zero2'",
}

_DDP_ONLY = (
    "bucket_cap_mb",
    "find_unused_parameters",
    "static_graph",
    "gradient_as_bucket_view",
    "broadcast_buffers",
)

_GEMINI_ONLY = (
    "placement",
    "chunk_size_m",
    "shard_param_frac",
    "offload_optim_frac",
    "offload_param_frac",
)

_PLUGINS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_DDP_ONLY, ("ddp",)),
    "reduce_bucket_size_m": ("zero1", "zero2"),
    "elementwise_optimizer": ("zero1", "zero2", "gemini", "fsdp", "hybrid"),
    "sharding": ("fsdp",),
    "wrap": ("fsdp",),
    "tp_size": ("hybrid",),
    "pp_size": ("hybrid",),
    **dict.fromkeys(_GEMINI_ONLY, ("gemini",)),
}
"""The plugins that an option has a meaning for; one that is not here has it for all."""

_SCALER = (
    *("initial_scale", "min_scale", "max_scale", "hysteresis"),
    *("growth_factor", "backoff_factor", "growth_interval"),
)

_PRECISION = {
    "precision": "the run's precision",
    "master_weights": "the run's precision",
    "max_norm": "the run's max_grad_norm",
    "norm_type": "the run's max_grad_norm",
    **dict.fromkeys(_SCALER, "the run's fp16 loss scaler"),
}

_OWNED: dict[str, dict[str, str]] = {
    "ddp": {name: f"the option '{name}'" for name in _DDP_ONLY},
    "zero": {
        "stage": "the option 'plugin'",
        "reduce_bucket_size_in_m": "the option 'reduce_bucket_size_m'",
        "cast_inputs": "the run's precision",
        **_PRECISION,
    },
    "gemini": {
        "placement_policy": "the option 'placement'",
        "min_chunk_size_m": "the option 'chunk_size_m'",
        "search_range_m": "the option 'chunk_size_m'",
        "hidden_dim": "the option 'chunk_size_m'",
        "chunk_config_dict": "the option 'chunk_size_m'",
        "force_outputs_fp32": "the run's precision",
        "enable_gradient_accumulation": "the run's micro_batch_size",
        **{name: f"the option '{name}'" for name in _GEMINI_ONLY if name.endswith("frac")},
        **_PRECISION,
    },
    "fsdp": {
        "sharding_strategy": "the option 'sharding'",
        "auto_wrap_policy": "the option 'wrap'",
        "mixed_precision": "the run's precision",
        "sync_module_states": "rank 0's weights, which all ranks begin with",
        "process_group": "the run's processes",
    },
    "hybrid": {
        "tp_size": "the option 'tp_size'",
        "pp_size": "the option 'pp_size'",
        "num_microbatches": "the run's micro_batch_size",
        "microbatch_size": "the run's micro_batch_size",
        "gradient_checkpoint_config": "the run's activation_checkpointing",
        **_PRECISION,
    },
}
"""The plugins' arguments that unipar fills in, and from what."""

_FREE: dict[str, tuple[str, ...]] = {
    "ddp": ("check_reduction",),
    "zero": ("verbose",),
    "gemini": ("verbose", "warmup_non_model_data_ratio", "steady_cuda_cap_ratio"),
    "fsdp": (),
    "hybrid": ("make_vocab_size_divisible_by", "ddp_bucket_cap_mb", "gradient_as_bucket_view"),
}
"""The plugins' arguments that a user may set natively: they change no number."""


class ColossalAIOptions(StrategyOptions):
    """What Colossal-AI's plugins let one tune."""

    strategy: ClassVar[str] = "colossalai"

    plugin: Plugin = Field(
        default="zero2",
        description="'ddp' keeps replicas; 'zero1' divides the optimizer among ranks, and 'zero2' "
        "the gradients too; 'gemini' the half-precision weights as well; 'hybrid' divides the "
        "layers of a model of transformers, or the row of them.",
    )
    bucket_cap_mb: int = Field(
        default=25, gt=0, description="With 'ddp': size of a gradient bucket, in MiB."
    )
    find_unused_parameters: bool = Field(
        default=False,
        description="With 'ddp': some parameters get no gradient in some steps.",
    )
    static_graph: bool = Field(
        default=False, description="With 'ddp': the graph is the same in every step."
    )
    gradient_as_bucket_view: bool = Field(
        default=True, description="With 'ddp': gradients live in the communication buckets."
    )
    broadcast_buffers: bool = Field(
        default=True,
        description="With 'ddp': every forward starts from rank 0's buffers.",
    )
    reduce_bucket_size_m: int = Field(
        default=12,
        gt=0,
        description="With 'zero1' and 'zero2': elements of a bucket of gradients, in 2**20.",
    )
    elementwise_optimizer: bool = Field(
        default=False,
        description="Not with 'ddp': promise that an optimizer not of torch.optim updates each "
        "element by itself, so that it may be given a part of a tensor.",
    )
    tp_size: int = Field(
        default=1,
        ge=1,
        description="With 'hybrid': how many processes share each layer (tensor parallelism).",
    )
    pp_size: int = Field(
        default=1,
        ge=1,
        description="With 'hybrid': how many stages the layers fall into (pipeline parallelism).",
    )
    placement: Literal["static", "auto"] = Field(
        default="static",
        description="With 'gemini': 'static' keeps what the fractions say on the device; 'auto' "
        "moves chunks between device and host as memory allows, after watching a first step.",
    )
    chunk_size_m: float = Field(
        default=32.0,
        ge=0,
        description="With 'gemini': least elements of a chunk, in 2**20. No chunk is larger than "
        "the model, and none smaller than its largest parameters.",
    )
    shard_param_frac: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="With 'gemini' and static placement: fraction of the weights that ranks let go "
        "of between forward and backward.",
    )
    offload_optim_frac: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="With 'gemini' and static placement: fraction of the optimizer in host memory.",
    )
    offload_param_frac: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="With 'gemini' and static placement, where all else is sharded and offloaded: "
        "fraction of the weights in host memory.",
    )
    sharding: Literal["full", "grad_op"] = Field(
        default="full",
        description="With 'fsdp': 'full' frees weights after each use; 'grad_op' keeps them from "
        "forward to backward.",
    )
    wrap: Literal["auto", "none"] | tuple[str, ...] = Field(
        default="auto",
        description="With 'fsdp': which submodules are gathered as units: the repeated blocks "
        "('auto'), the model as a whole ('none'), or modules of the named classes.",
    )
    native: dict[str, Any] = Field(
        default_factory=dict, description="Further arguments of the plugin's class."
    )

    @model_validator(mode="before")
    @classmethod
    def _known_plugin(cls, given: Any) -> Any:
        name = given.get("plugin") if isinstance(given, dict) else None
        if name in _NOT_OFFERED:
            raise ConfigError(f"colossalai: plugin='{name}' is not offered: {_NOT_OFFERED[name]}.")
        return given

    @model_validator(mode="after")
    def _fits_the_plugin(self) -> ColossalAIOptions:
        for name in sorted(self.model_fields_set & _PLUGINS.keys()):
            if self.plugin not in _PLUGINS[name]:
                *others, last = _PLUGINS[name]
                only = f"{', '.join(others)} or {last}" if others else last
                raise ValueError(f"{name} has no meaning with plugin='{self.plugin}'; {only} only")
        fractions = (self.shard_param_frac, self.offload_optim_frac, self.offload_param_frac)
        if self.placement == "auto" and fractions != (1.0, 0.0, 0.0):
            raise ValueError("placement='auto' decides by itself: leave the fractions out")
        if self.offload_param_frac and fractions[:2] != (1.0, 1.0):
            raise ValueError("offload_param_frac needs shard_param_frac=1 and offload_optim_frac=1")
        return self

    @property
    def stage(self) -> int:
        """The ZeRO stage; 0 for replicas."""
        return {"ddp": 0, "zero1": 1, "zero2": 2, "gemini": 3, "fsdp": 3, "hybrid": 0}[self.plugin]

    @property
    def _family(self) -> str:
        return "zero" if self.plugin in ZERO else self.plugin

    def check_native(self) -> None:
        """Refuse native arguments that unipar fills in itself, or that no test has proved.

        Raises:
            ConfigError: there is one.
        """
        family = self._family
        for name in self.native:
            if name in _OWNED[family]:
                raise ConfigError(
                    f"colossalai: native sets '{name}', which follows from "
                    f"{_OWNED[family][name]}. Set that one, and leave it out of native."
                )
            if name not in _FREE[family]:
                allowed = ", ".join(_FREE[family]) or "none"
                raise ConfigError(
                    f"colossalai: native sets '{name}', which plugin='{self.plugin}' does not take "
                    f"here.{did_you_mean(name, _FREE[family])} It takes: {allowed}."
                )

    def arguments(self) -> dict[str, Any]:
        """The arguments that the plugin's class is called with."""
        if self.plugin == "ddp":
            return {**{name: getattr(self, name) for name in _DDP_ONLY}, **self.native}
        if self.plugin == "hybrid":
            return {
                "tp_size": self.tp_size,
                "pp_size": self.pp_size,
                # Half precision is autocast's, here too.
                "precision": "fp32",
                # Whole logits, which a loss of the user's own can be computed from.
                "parallel_output": False,
                # The schedule is told by each step.
                "num_microbatches": 1,
                **self.native,
            }
        if self.plugin == "fsdp":
            return {}
        if self.plugin == "gemini":
            return {
                "placement_policy": self.placement,
                "shard_param_frac": self.shard_param_frac,
                "offload_optim_frac": self.offload_optim_frac,
                "offload_param_frac": self.offload_param_frac,
                # What it finds by searching is the least waste, at the price of larger chunks.
                "search_range_m": 0,
                # Gradients get a place of their own beside the weights.
                "enable_gradient_accumulation": True,
                "enable_async_reduce": False,
                **self.native,
            }
        return {
            "stage": self.stage,
            # Half precision is autocast's: weights, gradients and reductions stay fp32.
            "precision": "fp32",
            "cast_inputs": False,
            "reduce_bucket_size_in_m": self.reduce_bucket_size_m,
            # It uses streams that only CUDA has, and its result is not proved.
            "overlap_communication": False,
            **self.native,
        }
