"""The plugins: each with the arguments of the real one, and the strategy that it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from unipar.compat.colossalai.booster.plugin_base import (
    DPPluginBase,
    PipelinePluginBase,
    Plugin,
)
from unipar.compat.colossalai_names import PLUGINS as NAMES
from unipar.compat.run import current
from unipar.errors import ConfigError

__all__ = [
    "DPPluginBase", "GeminiPlugin", "HybridParallelPlugin", "LowLevelZeroPlugin",
    "MoeHybridParallelPlugin", "PipelinePluginBase", "Plugin", "TorchDDPPlugin", "TorchFSDPPlugin",
]  # fmt: skip

_FP8 = {
    "use_fp8": "Set precision: fp8 in unipar.yaml.",
    "fp8_communication": "Leave it out, or set compression of the strategy ddp in unipar.yaml.",
}
_ZERO = {
    **_FP8,
    "norm_type": "Strategies clip to a 2-norm.",
    "master_weights": "Weights are fp32 here, which optimizers update. Leave it out.",
}
_GROUPS = "Name the strategy in unipar.yaml, such as 'fsdp:sharding=hybrid'."


def _given(plugin: Any, names: Mapping[str, str]) -> dict[str, Any]:
    """Options of those arguments that are not at their defaults."""
    fields = type(plugin).__dataclass_fields__
    return {
        option: getattr(plugin, name)
        for name, option in names.items()
        if getattr(plugin, name) != fields[name].default
    }


def _offloading(wanted: bool) -> dict[str, Any]:
    return {"cpu_offload": True} if wanted else {}


@dataclass
class TorchDDPPlugin(DPPluginBase):
    """Replicas. Every BatchNorm has the statistics of all ranks, on a GPU."""

    REFUSED: ClassVar = {"fp8_communication": _FP8["fp8_communication"]}
    syncs_batchnorm: ClassVar[bool] = True

    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    fp8_communication: bool = False

    def control_precision(self) -> bool:
        return False

    @property
    def shares_buffers(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.broadcast_buffers

    def strategy(self) -> dict[str, Any] | None:
        if self.world_size == 1:
            return None
        same = ("broadcast_buffers", "bucket_cap_mb", "find_unused_parameters", "static_graph")
        return {"name": "ddp", **_given(self, {one: one for one in same})}


@dataclass
class TorchFSDPPlugin(DPPluginBase):
    """Weights that are gathered unit by unit."""

    # Colossal-AI 0.5.0 makes one parameter of all (FSDP1 with use_orig_params=False).
    zeros_unused: ClassVar[bool] = True
    REFUSED: ClassVar = {
        "fp8_communication": _FP8["fp8_communication"],
        "ignored_modules": "Freeze what is not to be trained.",
        "param_init_fn": "Build the model's weights; each rank begins with rank 0's.",
    }
    DIVIDING: ClassVar = {
        "process_group": _GROUPS,
        "auto_wrap_policy": "Set wrap or wrap_min_params of the strategy fsdp in unipar.yaml.",
    }

    process_group: Any = None
    sharding_strategy: Any = None
    cpu_offload: Any = None
    auto_wrap_policy: Any = None
    backward_prefetch: Any = None
    mixed_precision: Any = None
    ignored_modules: Any = None
    param_init_fn: Any = None
    sync_module_states: bool = False
    fp8_communication: bool = False

    def __post_init__(self) -> None:
        dtype = getattr(self.mixed_precision, "param_dtype", None)
        if dtype is not None:
            word = str(dtype).removeprefix("torch.")
            self.precision = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(word)
        super().__post_init__()

    def strategy(self) -> dict[str, Any] | None:
        word = getattr(self.sharding_strategy, "name", "FULL_SHARD")
        if word == "NO_SHARD":
            return {"name": "ddp"} if self.world_size > 1 else None
        kinds = {"FULL_SHARD": "full", "SHARD_GRAD_OP": "grad_op", "HYBRID_SHARD": "hybrid"}
        if word not in kinds:
            raise ConfigError(
                f"TorchFSDPPlugin(sharding_strategy={word}) has no counterpart here. Choose of "
                f"{', '.join(kinds)} and NO_SHARD."
            )
        offloads = bool(getattr(self.cpu_offload, "offload_params", False))
        if self.world_size == 1 and not offloads:
            return None
        return {"name": "fsdp", "sharding": kinds[word], **_offloading(offloads)}


@dataclass
class LowLevelZeroPlugin(DPPluginBase):
    """The optimizer divided among ranks (ZeRO-1), or gradients too (ZeRO-2)."""

    REFUSED: ClassVar = _ZERO
    DIVIDING: ClassVar = {"extra_dp_size": _GROUPS}
    clips_by_itself: ClassVar[bool] = True
    has_copies: ClassVar[bool] = True
    measures_norm: ClassVar[bool] = True

    stage: int = 1
    precision: str = "fp16"
    initial_scale: float = 2**32
    min_scale: float = 1
    growth_factor: float = 2
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float = 2**32
    max_norm: float = 0.0
    norm_type: float = 2.0
    reduce_bucket_size_in_m: int = 12
    communication_dtype: Any = None
    overlap_communication: bool = True
    overlap_allgather: bool = False
    cpu_offload: bool = False
    master_weights: bool = True
    verbose: bool = False
    cast_inputs: bool = True
    fp8_communication: bool = False
    use_fp8: bool = False
    extra_dp_size: int = 1

    def strategy(self) -> dict[str, Any] | None:
        own = _given(self, {"reduce_bucket_size_in_m": "reduce_bucket_size_m"})
        return _zero(self, self.stage, offloads=self.cpu_offload, **own)


def _zero(plugin: Plugin, stage: int, *, offloads: bool, **own: Any) -> dict[str, Any] | None:
    """ZeRO of a stage: Colossal-AI's, or PyTorch's own."""
    if stage not in (1, 2):
        raise ConfigError(f"ZeRO's stage is {stage}, and plugins have 1 and 2.")
    if offloads:
        return {"name": "fsdp", "sharding": "grad_op", "cpu_offload": True}
    if plugin.world_size == 1:
        return None
    other = {"name": "ddp", "shard_optimizer": True}
    if stage == 2:
        other = {"name": "fsdp", "sharding": "grad_op"}
    return plugin.itself({"plugin": f"zero{stage}", **own}, other)


@dataclass
class GeminiPlugin(DPPluginBase):
    """Half-precision weights in chunks, of which each rank holds a part."""

    REFUSED: ClassVar = _ZERO
    DIVIDING: ClassVar = {"extra_dp_size": _GROUPS}
    clips_by_itself: ClassVar[bool] = True
    has_copies: ClassVar[bool] = True

    chunk_config_dict: Any = None
    chunk_init_device: Any = None
    placement_policy: str = "static"
    enable_gradient_accumulation: bool = False
    max_prefetch: int = 0
    shard_param_frac: float = 1.0
    offload_optim_frac: float = 0.0
    offload_param_frac: float = 0.0
    warmup_non_model_data_ratio: float = 0.8
    steady_cuda_cap_ratio: float = 0.9
    precision: str = "fp16"
    master_weights: bool = True
    pin_memory: bool = False
    force_outputs_fp32: bool = False
    strict_ddp_mode: bool = False
    search_range_m: int = 32
    hidden_dim: int | None = None
    min_chunk_size_m: float = 32
    memstats: Any = None
    gpu_margin_mem_ratio: float = 0.0
    initial_scale: float = 2**16
    min_scale: float = 1
    growth_factor: float = 2
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float = 2**32
    max_norm: float = 0.0
    norm_type: float = 2.0
    tp_size: int = 1
    extra_dp_size: int = 1
    enable_all_optimization: bool = False
    enable_fused_normalization: bool = False
    enable_flash_attention: bool = False
    enable_sequence_parallelism: bool = False
    enable_jit_fused: bool = False
    enable_async_reduce: bool = True
    use_fp8: bool = False
    verbose: bool = False
    fp8_communication: bool = False

    def __post_init__(self) -> None:
        self._wanted_tp = self.tp_size
        super().__post_init__()
        self.tp_size = current.layout(self.asked()).tp

    @property
    def accumulates(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.enable_gradient_accumulation

    def replicas(self, size: int) -> int:
        return max(1, size // self._wanted_tp)

    def strategy(self) -> dict[str, Any] | None:
        if self.tp_size > 1:
            return {"name": "mesh", "tp": self.tp_size}
        offloads = _offloading(bool(self.offload_optim_frac or self.offload_param_frac))
        if self.world_size == 1 and not offloads:
            return None
        options = _given(self, {
            "placement_policy": "placement", "min_chunk_size_m": "chunk_size_m",
            "shard_param_frac": "shard_param_frac", "offload_optim_frac": "offload_optim_frac",
            "offload_param_frac": "offload_param_frac",
        })  # fmt: skip
        return self.itself({"plugin": "gemini", **options}, {"name": "fsdp", **offloads})


class _Stages:
    """The only stage that a rank's whole model is."""

    num_stages, stage = 1, 0

    def is_first_stage(self, ignore_chunk: bool = False) -> bool:
        return True

    def is_last_stage(self, ignore_chunk: bool = False) -> bool:
        return True


@dataclass
class HybridParallelPlugin(PipelinePluginBase):
    """Layers that ranks divide, beside replicas or ZeRO.

    Attributes:
        tp_size: how many ranks share a layer under the run's strategy.
        pp_size: 1, for a rank has the whole row of layers under any strategy with a loop of one's
            own.
        last_microbatch_size: samples of a micro-batch of the last batch, if there was one.
    """

    REFUSED: ClassVar = _FP8
    _SEQUENCES: ClassVar = "Use 'mesh:tp=2,sequence_parallel=true' in unipar.yaml."
    DIVIDING: ClassVar = {
        "sp_size": _SEQUENCES,
        "enable_sequence_parallelism": _SEQUENCES,
        "custom_policy": "Set plan of the strategy mesh in unipar.yaml.",
    }

    tp_size: int
    pp_size: int
    sp_size: int | None = None
    precision: str = "fp16"
    zero_stage: int = 0
    enable_all_optimization: bool = False
    enable_fused_normalization: bool = False
    enable_flash_attention: bool = False
    enable_jit_fused: bool = False
    enable_sequence_parallelism: bool = False
    sequence_parallelism_mode: str | None = None
    parallel_output: bool = True
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    initial_scale: float = 2**16
    min_scale: float = 1
    growth_factor: float = 2
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float = 2**32
    max_norm: float = 0
    broadcast_buffers: bool = True
    ddp_bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    zero_bucket_size_in_m: int = 12
    cpu_offload: bool = False
    communication_dtype: Any = None
    overlap_communication: bool = True
    custom_policy: Any = None
    pp_style: str = "1f1b"
    num_model_chunks: int = 1
    scheduler_nodes: Any = None
    num_layers_per_stage: Any = None
    gradient_checkpoint_config: Any = None
    enable_metadata_cache: bool = True
    make_vocab_size_divisible_by: int = 64
    dp_outside: bool = True
    overlap_p2p: bool = True
    overlap_allgather: bool = False
    fp8_communication: bool = False
    use_fp8: bool = False
    inner_ring_size: int | None = None

    def __post_init__(self) -> None:
        self._wanted = self.tp_size * self.pp_size * (self.sp_size or 1)
        self.stage_manager = _Stages()
        self.last_microbatch_size: int | None = None
        super().__post_init__()
        layout = current.layout(self.asked())
        self.tp_size, self.pp_size, self.sp_size = layout.tp, 1, 1

    @property
    def clips_by_itself(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        # In half precision it clips copies that have no gradients yet (Colossal-AI 0.5,
        # amp/naive_amp/mixed_precision_optimizer.py), so that clip_grad_by_norm clips nothing.
        return self.zero_stage > 0 or self.precision != "fp32"

    @property
    def has_copies(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.clips_by_itself

    @property
    def measures_norm(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.zero_stage > 0

    @property
    def syncs_batchnorm(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.zero_stage == 0

    @property
    def shares_buffers(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.zero_stage == 0 and self.broadcast_buffers

    @property
    def enable_pipeline_parallelism(self) -> bool:
        """``False``: see ``pp_size``."""
        return False

    def replicas(self, size: int) -> int:
        return max(1, size // self._wanted)

    def strategy(self) -> dict[str, Any] | None:
        if self.pp_size > 1:
            raise ConfigError(
                f"{self._name}(pp_size={self.pp_size}) cuts the model into stages, which take "
                "whole steps and no loop of one's own. Set another strategy in unipar.yaml or "
                "UNIPAR_STRATEGY, such as fsdp or mesh:tp=2: execute_pipeline then computes the "
                "same, each rank with all layers. For stages, use unipar.fit with mesh:pp=2."
            )
        if self.tp_size > 1:
            own = {"plugin": "hybrid", "tp_size": self.tp_size}
            if self.zero_stage:
                own["zero_stage"] = self.zero_stage
            return self.itself(own, {"name": "mesh", "tp": self.tp_size})
        if self.zero_stage:
            return _zero(self, self.zero_stage, offloads=self.cpu_offload)
        if self.world_size == 1:
            return None
        same = ("broadcast_buffers", "find_unused_parameters", "static_graph")
        options = {one: one for one in same} | {"ddp_bucket_cap_mb": "bucket_cap_mb"}
        return {"name": "ddp", **_given(self, options)}


class MoeHybridParallelPlugin(HybridParallelPlugin):
    """Experts that ranks divide, beside what :class:`HybridParallelPlugin` does.

    Args:
        tp_size: how many ranks share a layer.
        pp_size: how many stages there are.
        ep_size: how many ranks divide the experts.
        sp_size: how many ranks divide a sequence.
        args: the others of :class:`HybridParallelPlugin`.
        overlap_communication: without effect.
        moe_dp_outside: without effect.
        kwargs: as ``args``.
    """

    def __init__(
        self,
        tp_size: int,
        pp_size: int,
        ep_size: int,
        sp_size: int | None = None,
        *args: Any,
        overlap_communication: bool = False,
        moe_dp_outside: bool = True,
        **kwargs: Any,
    ) -> None:
        self.ep_size = ep_size
        super().__init__(tp_size, pp_size, sp_size, *args, **kwargs)
        self.ep_size = current.layout(self.asked()).ep

    def strategy(self) -> dict[str, Any] | None:
        if self.ep_size == 1:
            return super().strategy()
        if self.tp_size > 1 or self.pp_size > 1:
            raise ConfigError(
                f"MoeHybridParallelPlugin(ep_size={self.ep_size}) with tp_size or pp_size has no "
                "counterpart. Leave those at 1, or name a strategy in unipar.yaml."
            )
        return {"name": "mesh", "ep": self.ep_size}


PLUGINS = (
    TorchDDPPlugin, TorchFSDPPlugin, LowLevelZeroPlugin, GeminiPlugin, HybridParallelPlugin,
    MoeHybridParallelPlugin,
)  # fmt: skip
"""Those whose arguments are the real ones'."""

__getattr__ = NAMES.refusing(__name__)
