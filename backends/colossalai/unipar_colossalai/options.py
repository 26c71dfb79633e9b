"""The options of the strategy: one plugin of Colossal-AI's Booster, and what it lets one tune."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from unipar.errors import ConfigError
from unipar.strategy import StrategyOptions
from unipar_colossalai.plugins import PLUGINS

Plugin = Literal["ddp", "zero1", "zero2", "gemini", "fsdp", "hybrid"]

_NOT_OFFERED = {
    "moe": "its expert parallelism is not proved. Use plugin='zero2'",
}
_OTHER_AXES = {
    "tp": "Here it is tp_size, with plugin='hybrid': 'colossalai:plugin=hybrid,tp_size=2'",
    "pp": "Here it is pp_size, with plugin='hybrid': 'colossalai:plugin=hybrid,pp_size=2'",
    **dict.fromkeys(
        ("cp", "sp", "sp_size"),
        "with sequence parallelism Colossal-AI 0.5.0 loses Llama's causal mask under PyTorch's "
        "attention, and gives GPT-2 wrong gradients, without a word. Use 'mesh:cp=2', or "
        "'mesh:tp=2,sequence_parallel=true'",
    ),
    **dict.fromkeys(
        ("ep", "ep_size"),
        "Colossal-AI's experts (MoeHybridParallelPlugin) are not proved: it has no fp32 with ZeRO, "
        "and fails without. Use 'mesh:ep=2'",
    ),
}
"""Ways to divide a model or a batch that are called otherwise or not offered, and what to use."""


class ColossalAIOptions(StrategyOptions):
    """Options of Colossal-AI's plugins."""

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
        description="With 'ddp': every step starts from rank 0's buffers.",
    )
    reduce_bucket_size_m: int = Field(
        default=12,
        gt=0,
        description="With 'zero1' and 'zero2': elements of a bucket of gradients, in 2**20.",
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
    zero_stage: Literal[0, 1, 2] = Field(
        default=0,
        description="With 'hybrid' and tp_size: what replicas divide of what each rank has: "
        "nothing, the optimizer (1), or gradients too (2).",
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
        for axis, why in _OTHER_AXES.items():
            if isinstance(given, dict) and axis in given:
                raise ValueError(f"{axis}={given[axis]} cannot be had: {why}")
        return given

    @model_validator(mode="after")
    def _fits_the_plugin(self) -> ColossalAIOptions:
        for name in sorted(self.model_fields_set - {"plugin", "native"}):
            if name not in PLUGINS[self.plugin].tunes:
                *others, last = (key for key, plugin in PLUGINS.items() if name in plugin.tunes)
                only = f"{', '.join(others)} or {last}" if others else last
                raise ValueError(f"{name} has no meaning with plugin='{self.plugin}'; {only} only")
        PLUGINS[self.plugin].check_options(self)
        return self

    @property
    def stage(self) -> int:
        """The ZeRO stage; 0 for replicas."""
        return PLUGINS[self.plugin].stage
