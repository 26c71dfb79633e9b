"""Layers, parameters and data divided over one grid of ranks, natively: its options, and what it
can do."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator
from torch import nn

from unipar.engine import StepEngine
from unipar.errors import ConfigError
from unipar.layout import Layout
from unipar.strategy import Capabilities, EngineSpec, ModelContext, Strategy, build_model
from unipar.utils.garbage_collection import no_collection
from unipar.world import Placement, World
from unipar_torch.from_host import on_meta
from unipar_torch.fsdp import ShardingOptions, explain_dtypes
from unipar_torch.single import DEVICE_TYPES, PRECISIONS

_NOT_BUILT = {"pp": "pipeline", "cp": "context"}


class MeshOptions(ShardingOptions):
    """Sizes of the axes, which layers are divided, and what ``fully_shard`` lets one tune."""

    strategy: ClassVar[str] = "mesh"

    dp_replicate: int = Field(
        default=1, ge=1, description="Copies of the sharded model, each on other samples."
    )
    dp_shard: int | None = Field(
        default=None,
        ge=1,
        description="Ranks on other samples that divide parameters, gradients and optimizer. "
        "Default: what the other axes leave of the processes.",
    )
    tp: int = Field(
        default=1, ge=1, description="Ranks that divide each layer, on the same samples."
    )
    sequence_parallel: bool = Field(
        default=False,
        description="Between divided layers each rank of 'tp' has a part of the sequence.",
    )
    plan: dict[str, str] | None = Field(
        default=None,
        description="Layers that 'tp' divides, and how: patterns of names, in which * stands for "
        "one part, to 'colwise', 'rowwise', 'colwise_gather_output', 'rowwise_split_input', "
        "'embedding_rowwise', 'embedding_colwise' or 'replicated_with_grad_allreduce'. Default: "
        "the model's own plan, or one found by tracing its blocks.",
    )
    ep: int = Field(
        default=1,
        ge=1,
        description="Ranks that divide the experts of each layer, among those on other samples: "
        "it divides dp_shard.",
    )
    experts: tuple[str, ...] | None = Field(
        default=None,
        description="Modules that hold the experts which 'ep' divides: patterns of names, in which "
        "* stands for one part. Default: those of the model's own plan, or those whose forward "
        "takes (hidden_states, top_k_index, top_k_weights).",
    )
    sharding: Literal["full", "grad_op"] = Field(
        default="full",
        description="'full' frees parameters after each use; 'grad_op' keeps them from forward to "
        "backward.",
    )

    @property
    def keeps_gathered(self) -> bool:
        return self.sharding == "grad_op"

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_built(cls, values: Any) -> Any:
        for axis in _NOT_BUILT.keys() & values.keys() if isinstance(values, Mapping) else ():
            raise ValueError(
                f"{axis} ({_NOT_BUILT[axis]} parallelism) is not built yet. Allowed axes: "
                "dp_replicate, dp_shard, tp, ep. Leave it out"
            )
        return values

    @model_validator(mode="after")
    def _layers_are_divided(self) -> MeshOptions:
        if self.tp == 1 and self.sequence_parallel:
            raise ValueError(
                "sequence_parallel=true divides sequences among the ranks of tp, and tp is 1. Set "
                "tp=2 or more, or leave sequence_parallel out"
            )
        if self.tp == 1 and self.plan is not None:
            raise ValueError(
                "plan says how layers are divided among the ranks of tp, and tp is 1. Set tp=2 or "
                "more, or leave plan out"
            )
        return self

    @model_validator(mode="after")
    def _experts_are_divided(self) -> MeshOptions:
        if self.ep == 1 and self.experts is not None:
            raise ValueError(
                "experts names modules that the ranks of ep divide, and ep is 1. Set ep=2 or more, "
                "or leave experts out"
            )
        for axis in ("tp", "pp", "cp"):
            if self.ep > 1 and (size := getattr(self, axis, 1)) > 1:
                raise ValueError(
                    f"ep={self.ep} with {axis}={size} is not built yet. Leave one of them out"
                )
        return self


class MeshStrategy(Strategy):
    """Tensor parallelism by DTensor, and FSDP2 over the other ranks."""

    name = "mesh"
    options_type = MeshOptions
    options: MeshOptions
    rewrites_module = True
    _casts = False
    """Whether an engine's units compute in half precision without autocast."""

    def capabilities(self) -> Capabilities:
        # torch's loss scaler takes gradients of one mesh (2.13, amp/grad_scaler.py, unscale_).
        unable = {"fp8", "fp16"} if self.options.ep > 1 else {"fp8"}
        return Capabilities(
            PRECISIONS - unable,
            DEVICE_TYPES,
            sharded=frozenset({"parameters", "gradients", "optimizer"}),
            offload=frozenset({"parameters", "optimizer"}),
            parallelize=True,
            splits_tensors=True,
            sparse_gradients=False,
        )

    def layout(self, placement: Placement) -> Layout:
        options = self.options
        others = options.dp_replicate * options.tp
        shard = options.dp_shard
        if shard is None:
            shard, left = divmod(placement.size, others)
            if left or not shard:
                raise ConfigError(
                    f"mesh: dp_replicate={options.dp_replicate} * tp={options.tp} does not divide "
                    f"the {placement.size} processes that there are. Start a multiple of {others} "
                    "processes, or set tp or dp_replicate to a divisor of their number."
                )
        layout = Layout(
            dp_replicate=options.dp_replicate, dp_shard=shard, tp=options.tp, ep=options.ep
        )
        layout.check(placement.size)
        return layout

    def check(self, spec: EngineSpec, placement: Placement) -> None:
        layout = self.layout(placement)
        if layout.tp == layout.ep == 1:
            return
        model = _skeleton(spec, layout, placement)
        # A session asks before it knows of any.
        if any(True for _ in model.parameters()):
            self._plan(model, layout)

    def placements(self, spec: EngineSpec, placement: Placement) -> list[tuple[str, str]]:
        """Say which layers are divided and where each parameter goes, for a dry run.

        Raises:
            ConfigError: the model cannot be divided.
        """
        from unipar_torch.placements import placements, remarks

        layout = self.layout(placement)
        model = _skeleton(spec, layout, placement)
        if layout.ep > 1:
            from unipar_torch import expert_plan

            experts = self._plan(model, layout)
            said = expert_plan.remarks(experts, layout.ep)
            return [*said, *placements(model, layout, None, experts).items()]
        plan = self._plan(model, layout) if layout.tp > 1 else None
        said = [] if plan is None else list(remarks(plan))
        return [*said, *placements(model, layout, plan).items()]

    def prepare(self, spec: EngineSpec, world: World) -> StepEngine:
        self._casts |= spec.precision != "fp32" and self.options.param_dtype == "compute"
        # FSDP and DTensor take longer to import than torch, and only the workers need them.
        with no_collection():
            from unipar_torch.sharding import prepare
            from unipar_torch.tensor_parallel import divide_layers

        options = self.options
        if options.tp == options.ep == 1:
            return prepare(spec, world, options)

        # While a module has its values. Rounding may differ between machines, and plans must not.
        model = _skeleton(spec, world.layout, world.placement)
        plan = world.broadcast(self._plan(model, world.layout))
        if options.ep > 1:
            from unipar_torch.expert_parallel import divide_experts

            return prepare(
                spec,
                world,
                options,
                lambda module: divide_experts(module, plan, world),
                experts=tuple(plan.experts),
            )

        def divide(module: nn.Module) -> Any:
            return divide_layers(module, plan, world, sequence=options.sequence_parallel)

        return prepare(spec, world, options, divide)

    def _plan(self, model: nn.Module, layout: Layout) -> Any:
        if layout.ep > 1:
            from unipar_torch.expert_plan import make_expert_plan

            return make_expert_plan(model, layout.ep, self.options.experts, efsdp=layout.efsdp)
        from unipar_torch.tensor_plan import make_plan

        return make_plan(model, layout.tp, self.options.plan)

    def explain(self, error: BaseException) -> str:
        from unipar.engine.sharded import explain_mixed

        return explain_mixed(error, self.name) or (
            explain_dtypes(error, self.name) if self._casts else ""
        )


def _skeleton(spec: EngineSpec, layout: Layout, placement: Placement) -> nn.Module:
    """The model, or what its function builds on the meta device."""
    if isinstance(spec.model, nn.Module):
        return spec.model
    context = ModelContext(layout, 0, placement.device)
    return on_meta(functools.partial(build_model, spec.model, context), "mesh")
