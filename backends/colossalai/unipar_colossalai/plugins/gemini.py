"""``gemini``: half-precision weights in chunks, of which each rank holds a part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from unipar.errors import ConfigError
from unipar.strategy import Capabilities, EngineSpec
from unipar.world import Placement, World
from unipar_colossalai.plugins.base import DEVICES, PRECISION, SHARDED, Dividing

if TYPE_CHECKING:
    from unipar_colossalai.engine import BoosterEngine, Start
    from unipar_colossalai.options import ColossalAIOptions


class Gemini(Dividing):
    """Its parameters are of a class of its own, and empty between uses."""

    booster = "GeminiPlugin"
    stage = 3
    rewrites_module = True
    _fractions = ("shard_param_frac", "offload_optim_frac", "offload_param_frac")
    tunes = ("placement", "chunk_size_m", *_fractions)
    owned: ClassVar[Mapping[str, str]] = {
        "placement_policy": "the option 'placement'",
        "min_chunk_size_m": "the option 'chunk_size_m'",
        "search_range_m": "the option 'chunk_size_m'",
        "hidden_dim": "the option 'chunk_size_m'",
        "chunk_config_dict": "the option 'chunk_size_m'",
        "force_outputs_fp32": "the run's precision",
        "enable_gradient_accumulation": "the run's micro_batch_size",
        **{name: f"the option '{name}'" for name in _fractions},
        **PRECISION,
    }
    free = ("verbose", "warmup_non_model_data_ratio", "steady_cuda_cap_ratio")

    @classmethod
    def check_options(cls, options: ColossalAIOptions) -> None:
        fractions = tuple(getattr(options, name) for name in cls._fractions)
        if options.placement == "auto" and fractions != (1.0, 0.0, 0.0):
            raise ValueError("placement='auto' decides by itself: leave the fractions out")
        if options.offload_param_frac and fractions[:2] != (1.0, 1.0):
            raise ValueError("offload_param_frac needs shard_param_frac=1 and offload_optim_frac=1")

    def capabilities(self) -> Capabilities:
        return Capabilities(
            frozenset({"bf16", "fp16"}),
            DEVICES,
            sharded=frozenset(SHARDED),
            several_engines=False,
            compile=False,
            half_weights=True,
            splits_tensors=True,
            sparse_gradients=False,
        )

    def check(self, spec: EngineSpec, placement: Placement) -> None:
        if spec.precision == "fp32":
            raise ConfigError(
                "colossalai: plugin='gemini' computes with half-precision weights beside fp32 "
                "ones, and not in precision='fp32'. Set precision='bf16', or use plugin='zero2'."
            )
        super().check(spec, placement)

    def arguments(self, module: nn.Module, spec: EngineSpec, world: World) -> dict[str, Any]:
        # Gemini replicates a model that does not fill a chunk.
        elements = sum(p.numel() for p in module.parameters() if p.requires_grad)
        return {
            "placement_policy": self.options.placement,
            **{name: getattr(self.options, name) for name in self._fractions},
            "precision": spec.precision,
            "min_chunk_size_m": min(self.options.chunk_size_m, elements / 2**20),
            # What it finds by searching is the least waste, at the price of larger chunks.
            "search_range_m": 0,
            # Chunk sizes are multiples of it: the least that all ranks have an equal part of.
            "hidden_dim": world.size,
            # Gradients get a place of their own beside the weights.
            "enable_gradient_accumulation": True,
            "enable_async_reduce": False,
        }

    def prepare(self, start: Start) -> BoosterEngine:
        from unipar_colossalai.gemini import prepare

        return prepare(start)
