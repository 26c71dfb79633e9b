"""Fully sharded data parallel (FSDP2): its options, and what it can do."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator
from torch import nn

from unipar.errors import ConfigError
from unipar.layout import Layout
from unipar.strategy import Capabilities, EngineSpec, Strategy, StrategyOptions
from unipar.utils.garbage_collection import no_collection
from unipar.world import Placement, World
from unipar_torch.single import DEVICE_TYPES, PRECISIONS

if TYPE_CHECKING:
    from unipar.engine import StepEngine
    from unipar.sizing import Needs


_DTYPES_DIFFER = re.compile(
    "same (data)?type|same dtype|dtypes? match|mixed dtype|expected scalar type"
    "|(input|bias|weight) type .* should be the same",
    re.IGNORECASE,
)
"""What operations of torch 2.13 say, each in its own words."""


class ShardingOptions(StrategyOptions):
    """Options of ``fully_shard`` for any arrangement of ranks."""

    wrap: Literal["auto", "none"] | tuple[str, ...] = Field(
        default="auto",
        description="Which submodules are gathered as units: the repeated blocks ('auto'), the "
        "model as a whole ('none'), or modules of the named classes.",
    )
    wrap_min_params: int | None = Field(
        default=None,
        ge=1,
        description="Instead of 'wrap': submodules of at least this many parameters.",
    )
    reduce_dtype: Literal["fp32", "bf16"] = Field(
        default="fp32", description="The dtype in which gradients are summed over ranks."
    )
    param_dtype: Literal["compute", "fp32"] = Field(
        default="compute",
        description="The dtype in which parameters are gathered. 'compute' is that of the run's "
        "precision: each unit computes in it, and there is no autocast. 'fp32' leaves parameters "
        "as they are and computes by autocast, as ddp does: more traffic, and any model runs.",
    )
    reduce_scatter_every_microbatch: bool = Field(
        default=True,
        description="Gradients are divided among ranks after each micro-batch. false keeps them "
        "whole on each rank until the last one: one reduction a step, and memory for the gradients "
        "of the whole model.",
    )
    cpu_offload: bool = Field(
        default=False,
        description="Shards, gradients and optimizer live in host memory between uses.",
    )
    prefetch: int = Field(
        default=0, ge=0, description="Units gathered ahead explicitly; 0 leaves it to PyTorch."
    )

    @property
    def keeps_gathered(self) -> bool:
        """Whether parameters stay gathered from forward to backward."""
        return False

    @property
    def keeps_root(self) -> bool:
        """Whether those that are in no unit do."""
        return self.keeps_gathered

    @model_validator(mode="after")
    def _wrapped_in_one_way(self) -> ShardingOptions:
        if self.wrap_min_params is not None and self.wrap != "auto":
            raise ValueError("give wrap or wrap_min_params, not both")
        return self


class FSDPOptions(ShardingOptions):
    """Options of ``fully_shard``."""

    strategy: ClassVar[str] = "fsdp"

    sharding: Literal["full", "grad_op", "hybrid"] = Field(
        default="full",
        description="'full' frees parameters after each use; 'grad_op' keeps them from forward to "
        "backward; 'hybrid' shards within groups of ranks and replicates across them.",
    )
    shard_size: int | None = Field(
        default=None,
        ge=1,
        description="With 'hybrid': ranks that share one replica. Default: those of a node, or "
        "half of all ranks where there is one node.",
    )
    keep_root: bool = Field(
        default=False,
        description="What is in no unit stays gathered from forward to backward, as fully_shard "
        "has it by itself: one gathering less a step. A change of such a weight is lost if it "
        "comes after a forward pass with gradients, and before a backward pass follows.",
    )

    @property
    def keeps_gathered(self) -> bool:
        return self.sharding == "grad_op"

    @property
    def keeps_root(self) -> bool:
        return self.keep_root or self.keeps_gathered

    @model_validator(mode="after")
    def _consistent(self) -> FSDPOptions:
        if self.shard_size is not None and self.sharding != "hybrid":
            raise ValueError("shard_size needs sharding='hybrid'")
        return self


class FSDPStrategy(Strategy):
    """PyTorch's FSDP2."""

    name = "fsdp"
    options_type = FSDPOptions
    options: FSDPOptions
    rewrites_module = True
    _casts = False
    """Whether an engine's units compute in half precision without autocast."""

    @classmethod
    def bid(cls, needs: Needs) -> float:
        return 3.0 if needs.devices > 1 and not needs.fits else 0.5

    def capabilities(self) -> Capabilities:
        return Capabilities(
            PRECISIONS,
            DEVICE_TYPES,
            sharded=frozenset({"parameters", "gradients", "optimizer"}),
            offload=frozenset({"parameters", "optimizer", "activations"}),
            selective_checkpointing=True,
            parallelize=True,
            splits_tensors=True,
            sparse_gradients=False,
            sample_dropout=True,
        )

    def layout(self, placement: Placement) -> Layout:
        if self.options.sharding != "hybrid":
            return Layout(dp_shard=placement.size)
        default = placement.local_size if placement.num_nodes > 1 else max(1, placement.size // 2)
        shard = self.options.shard_size or default
        if placement.size % shard:
            raise ConfigError(
                f"fsdp: sharding='hybrid' with shard_size={shard} does not divide "
                f"{placement.size} processes. Use a divisor of {placement.size}, or 'full'."
            )
        return Layout(dp_replicate=placement.size // shard, dp_shard=shard)

    def check(self, spec: EngineSpec, placement: Placement) -> None:
        self.layout(placement)
        if isinstance(spec.model, nn.Module):
            refuse_scalars(spec.model, self.name)

    def prepare(self, spec: EngineSpec, world: World) -> StepEngine:
        self._casts |= spec.precision != "fp32" and self.options.param_dtype == "compute"
        # FSDP and DTensor take longer to import than torch, and only the workers need them.
        with no_collection():
            from unipar_torch.sharding import prepare

        return prepare(spec, world, self.options)

    def explain(self, error: BaseException) -> str:
        from unipar.engine.sharded import explain_sharded

        return explain_sharded(error, self.name) or (
            explain_dtypes(error, self.name) if self._casts else ""
        )


def refuse_scalars(module: nn.Module, strategy: str) -> None:
    """Refuse a parameter that FSDP has no dimension to divide by."""
    for name, parameter in module.named_parameters():
        if parameter.ndim == 0:
            raise ConfigError(
                f"{strategy}: parameter '{name}' has no dimension, and FSDP divides parameters by "
                "their first one. Give it the shape (1,): nn.Parameter(torch.ones(1)); or use "
                "strategy='ddp'."
            )


def explain_dtypes(error: BaseException, strategy: str) -> str:
    """Explain an operation's complaint of its dtypes; empty for any other error."""
    if not isinstance(error, RuntimeError) or not _DTYPES_DIFFER.search(str(error)):
        return ""
    return (
        "an operation of the model was given tensors of different dtypes. Under strategy "
        f"'{strategy}' the parameters of a model in half precision are gathered in it, and what "
        "goes into each unit is cast to it; buffers, and what the model makes in fp32 itself, are "
        f"not. Use '{strategy}:param_dtype=fp32', which computes by autocast, or cast "
        f"the tensor in the model's forward (x.to(self.weight.dtype)). PyTorch says: {error}"
    )
