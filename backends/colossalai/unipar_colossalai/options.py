"""The options of the strategy: one plugin of Colossal-AI's Booster, and what it lets one tune."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

from pydantic import Field, model_validator

from unipar.errors import ConfigError, did_you_mean
from unipar.strategy import StrategyOptions

Plugin = Literal["ddp", "zero1", "zero2"]
ZERO: frozenset[str] = frozenset({"zero1", "zero2"})

_NOT_OFFERED = {
    "gemini": "its gradients are not proved equal to those of a plain loop. Use plugin='zero2'",
    "fsdp": "it wraps PyTorch's FSDP1. Use strategy='fsdp', which shards with FSDP2",
    "hybrid": "its tensor and pipeline parallelism are not proved. Use plugin='zero2'",
    "moe": "its expert parallelism is not proved. Use plugin='zero2'",
}

_DDP_ONLY = (
    "bucket_cap_mb",
    "find_unused_parameters",
    "static_graph",
    "gradient_as_bucket_view",
    "broadcast_buffers",
)

_SCALER = (
    *("initial_scale", "min_scale", "max_scale", "hysteresis"),
    *("growth_factor", "backoff_factor", "growth_interval"),
)

_OWNED: dict[str, dict[str, str]] = {
    "ddp": {name: f"the option '{name}'" for name in _DDP_ONLY},
    "zero": {
        "stage": "the option 'plugin'",
        "reduce_bucket_size_in_m": "the option 'reduce_bucket_size_m'",
        "precision": "the run's precision",
        "cast_inputs": "the run's precision",
        "master_weights": "the run's precision",
        "max_norm": "the run's max_grad_norm",
        "norm_type": "the run's max_grad_norm",
        **dict.fromkeys(_SCALER, "the run's fp16 loss scaler"),
    },
}
"""The plugins' arguments that unipar fills in, and from what."""

_FREE: dict[str, tuple[str, ...]] = {"ddp": ("check_reduction",), "zero": ("verbose",)}
"""The plugins' arguments that a user may set natively: they change no number."""


class ColossalAIOptions(StrategyOptions):
    """What Colossal-AI's plugins let one tune."""

    strategy: ClassVar[str] = "colossalai"

    plugin: Plugin = Field(
        default="zero2",
        description="'ddp' keeps replicas; 'zero1' divides the optimizer among ranks, and 'zero2' "
        "the gradients too.",
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
        description="With 'zero1' and 'zero2': promise that an optimizer not of torch.optim "
        "updates each element by itself, so that it may be given a part of a tensor.",
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
        wrong = _DDP_ONLY if self.plugin in ZERO else ("reduce_bucket_size_m",)
        if self.plugin == "ddp":
            wrong = (*wrong, "elementwise_optimizer")
        for name in wrong:
            if name in self.model_fields_set:
                others = "ddp" if self.plugin in ZERO else "zero1 or zero2"
                raise ValueError(
                    f"{name} has no meaning with plugin='{self.plugin}'; {others} only"
                )
        return self

    @property
    def stage(self) -> int:
        """The ZeRO stage; 0 for replicas."""
        return get_args(Plugin).index(self.plugin)

    def check_native(self) -> None:
        """Refuse native arguments that unipar fills in itself, or that no test has proved.

        Raises:
            ConfigError: there is one.
        """
        family = "zero" if self.plugin in ZERO else "ddp"
        for name in self.native:
            if name in _OWNED[family]:
                raise ConfigError(
                    f"colossalai: native sets '{name}', which follows from "
                    f"{_OWNED[family][name]}. Set that one, and leave it out of native."
                )
            if name not in _FREE[family]:
                allowed = ", ".join(_FREE[family])
                raise ConfigError(
                    f"colossalai: native sets '{name}', which plugin='{self.plugin}' does not take "
                    f"here.{did_you_mean(name, _FREE[family])} It takes: {allowed}."
                )

    def arguments(self) -> dict[str, Any]:
        """The arguments that the plugin's class is called with."""
        if self.plugin == "ddp":
            return {**{name: getattr(self, name) for name in _DDP_ONLY}, **self.native}
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
