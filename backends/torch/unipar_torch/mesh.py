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
from unipar_torch.stage_orders import SPLITTING, STYLES, ScheduleName, num_virtual

_NOT_BUILT = {"cp": "context", "ep": "expert"}


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
    pp: int = Field(
        default=1, ge=1, description="Ranks that have some of the layers each, as stages."
    )
    schedule: ScheduleName = Field(
        default="1f1b",
        description="In which order stages run their micro-batches: all forward passes first "
        "('gpipe'), a forward and a backward pass in turn ('1f1b'), the same with several stages "
        "on each rank ('interleaved'), or with two, and gradients of weights computed later than "
        "those of inputs ('zero-bubble', 'dualpipev').",
    )
    virtual_stages: int | None = Field(
        default=None,
        ge=1,
        description="Stages on each rank of 'pp'. Default: 2 where the schedule is 'interleaved'; "
        "other schedules have a number of their own.",
    )
    stages: tuple[tuple[str, ...], ...] | None = Field(
        default=None,
        description="Names of the modules of each stage, all blocks in their order; what two "
        "stages need is named in both. Default: as the model says, or by the order of its "
        "modules, such that the largest stage has the fewest parameters.",
    )
    sharding: Literal["full", "grad_op"] = Field(
        default="full",
        description="'full' frees parameters after each use; 'grad_op' keeps them from forward to "
        "backward.",
    )

    @property
    def keeps_gathered(self) -> bool:
        return self.sharding == "grad_op"

    @property
    def num_stages(self) -> int:
        """How many stages the model is cut into."""
        return self.pp * num_virtual(self.schedule, self.virtual_stages)

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_built(cls, values: Any) -> Any:
        for axis in _NOT_BUILT.keys() & values.keys() if isinstance(values, Mapping) else ():
            raise ValueError(
                f"{axis} ({_NOT_BUILT[axis]} parallelism) is not built yet. Allowed axes: "
                "dp_replicate, dp_shard, tp, pp. Leave it out"
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
    def _layers_are_staged(self) -> MeshOptions:
        if self.pp == 1:
            for name in ("schedule", "virtual_stages", "stages"):
                if name in self.model_fields_set and getattr(self, name) is not None:
                    raise ValueError(
                        f"{name} is about the stages that the ranks of pp have, and pp is 1. Set "
                        f"pp=2 or more, or leave {name} out"
                    )
            return self
        num_virtual(self.schedule, self.virtual_stages)
        if self.cpu_offload:
            raise ValueError("cpu_offload with pp is not built. Leave one of them out")
        if self.sequence_parallel:
            raise ValueError("sequence_parallel with pp is not built. Leave one of them out")
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
        staged = self.options.pp > 1
        return Capabilities(
            PRECISIONS - {"fp8"},
            DEVICE_TYPES,
            max_devices=self.options.pp if staged else None,
            sharded=frozenset({"parameters", "gradients", "optimizer"}),
            offload=frozenset() if staged else frozenset({"parameters", "optimizer"}),
            custom_loop=not staged,
            several_engines=not staged,
            activation_checkpointing=self.options.schedule not in SPLITTING,
            compile=not staged,
            parallelize=not staged,
            pipeline=staged,
            splits_tensors=True,
            sparse_gradients=False,
        )

    def layout(self, placement: Placement) -> Layout:
        options = self.options
        others = options.dp_replicate * options.tp * options.pp
        shard = options.dp_shard
        if shard is None:
            shard, left = divmod(placement.size, others)
            if left or not shard:
                said = f"dp_replicate={options.dp_replicate} * tp={options.tp}"
                said += f" * pp={options.pp}" if options.pp > 1 else ""
                raise ConfigError(
                    f"mesh: {said} does not divide the {placement.size} processes that there are. "
                    f"Start a multiple of {others} processes, or set tp or dp_replicate to a "
                    "divisor of their number."
                )
        layout = Layout(
            dp_replicate=options.dp_replicate, dp_shard=shard, tp=options.tp, pp=options.pp
        )
        layout.check(placement.size)
        return layout

    def check(self, spec: EngineSpec, placement: Placement) -> None:
        layout = self.layout(placement)
        if layout.pp > 1 and layout.size > layout.pp:
            raise ConfigError(
                f"mesh: pp={layout.pp} with other axes (tp={layout.tp}, dp_shard="
                f"{layout.dp_shard}, dp_replicate={layout.dp_replicate}) is not built. Start "
                f"{layout.pp} processes, or leave pp out."
            )
        if layout.tp == 1 and layout.pp == 1:
            return
        model = _skeleton(spec, layout, placement)
        # A session asks before it knows of any.
        if any(True for _ in model.parameters()):
            if layout.pp > 1:
                self._stages(model)
            if layout.tp > 1:
                self._plan(model, layout)

    def placements(self, spec: EngineSpec, placement: Placement) -> list[tuple[str, str]]:
        """Say which layers are divided and where each parameter goes, for a dry run.

        Raises:
            ConfigError: the model cannot be divided.
        """
        from unipar_torch.placements import placements, remarks

        layout = self.layout(placement)
        model = _skeleton(spec, layout, placement)
        plan = self._plan(model, layout) if layout.tp > 1 else None
        said = [] if plan is None else list(remarks(plan))
        if layout.pp > 1:
            from unipar_torch.stage_plan import describe

            style = STYLES.get(self.options.schedule, "loop")
            said += describe(model, self._stages(model), layout.pp, style)
        return [*said, *placements(model, layout, plan).items()]

    def prepare(self, spec: EngineSpec, world: World) -> StepEngine:
        self._casts |= spec.precision != "fp32" and self.options.param_dtype == "compute"
        # FSDP and DTensor take longer to import than torch, and only the workers need them.
        with no_collection():
            from unipar_torch.sharding import prepare
            from unipar_torch.tensor_parallel import divide_layers

        options = self.options
        if options.pp > 1:
            from unipar_torch import pipeline

            model = _skeleton(spec, world.layout, world.placement)
            return pipeline.prepare(spec, world, options, self._stages(model))
        if options.tp == 1:
            return prepare(spec, world, options)

        # While a module has its values. Rounding may differ between machines, and plans must not.
        model = _skeleton(spec, world.layout, world.placement)
        plan = world.broadcast(self._plan(model, world.layout))

        def divide(module: nn.Module) -> Any:
            return divide_layers(module, plan, world, sequence=options.sequence_parallel)

        return prepare(spec, world, options, divide)

    def _plan(self, model: nn.Module, layout: Layout) -> Any:
        from unipar_torch.tensor_plan import make_plan

        return make_plan(model, layout.tp, self.options.plan)

    def _stages(self, model: nn.Module) -> Any:
        from unipar_torch.stage_plan import plan_stages

        options = self.options
        return plan_stages(model, options.num_stages, options.stages, options.pp)

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
