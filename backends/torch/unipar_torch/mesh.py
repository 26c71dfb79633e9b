"""One grid of ranks that divides data, layers, sequences, stages and experts, natively."""

from __future__ import annotations

import functools
import math
from typing import Any

from torch import nn

from unipar.engine import StepEngine
from unipar.errors import ConfigError
from unipar.layout import Layout
from unipar.strategy import Capabilities, EngineSpec, ModelContext, Strategy, build_model
from unipar.utils.garbage_collection import no_collection
from unipar.world import Placement, World
from unipar_torch.from_host import on_meta
from unipar_torch.fsdp import explain_dtypes, refuse_scalars
from unipar_torch.mesh_options import MeshOptions
from unipar_torch.single import DEVICE_TYPES, PRECISIONS
from unipar_torch.stage_orders import SPLITTING, STYLES


class MeshStrategy(Strategy):
    """Tensor parallelism by DTensor, and FSDP2 over the other ranks."""

    name = "mesh"
    options_type = MeshOptions
    options: MeshOptions
    rewrites_module = True
    _casts = False
    """Whether an engine's units compute in half precision without autocast."""

    def capabilities(self) -> Capabilities:
        options = self.options
        staged, whole = options.pp > 1, options.pp == options.cp == 1
        # torch's loss scaler takes gradients of one mesh (2.13, amp/grad_scaler.py, unscale_).
        unable = {"fp8", "fp16"} if options.ep > 1 else {"fp8"}
        offload = {"parameters", "optimizer", "activations"}
        return Capabilities(
            PRECISIONS - unable,
            DEVICE_TYPES,
            sharded=frozenset({"parameters", "gradients", "optimizer"}),
            offload=frozenset() if staged else frozenset(offload),
            # Where a rank has a part of each sequence or of the logits, or no loss, only a whole
            # step knows of all.
            custom_loop=whole and not options.loss_parallel,
            several_engines=whole and not options.loss_parallel,
            compile=whole,
            activation_checkpointing=options.schedule not in SPLITTING,
            selective_checkpointing=not staged,
            parallelize=not staged,
            pipeline=staged,
            splits_tensors=True,
            sparse_gradients=False,
            sample_dropout=options.pp == options.cp == options.tp == options.ep == 1,
        )

    def layout(self, placement: Placement) -> Layout:
        options = self.options
        sizes = {axis: getattr(options, axis) for axis in ("dp_replicate", "cp", "tp", "pp")}
        shard = options.dp_shard
        if shard is None:
            others = math.prod(sizes.values())
            shard, left = divmod(placement.size, others)
            if left or not shard:
                given = {axis: size for axis, size in sizes.items() if size > 1}
                said = " * ".join(f"{axis}={size}" for axis, size in given.items())
                raise ConfigError(
                    f"mesh: {said} does not divide the {placement.size} processes that there are. "
                    f"Start a multiple of {others} processes, or set {' or '.join(given)} to a "
                    "divisor of their number."
                )
        layout = Layout(**sizes, dp_shard=shard, ep=options.ep)
        layout.check(placement.size)
        return layout

    def check(self, spec: EngineSpec, placement: Placement) -> None:
        layout = self.layout(placement)
        if layout.pp > 1:
            self.options.check_stages(layout)
            _check_staged(spec, layout.pp)
        if self.options.async_tp:
            from unipar_torch import async_tp

            async_tp.check(spec, placement)
        if layout.cp > 1 and isinstance(spec.model, nn.Module):
            from unipar_torch.context_parallel import refuse_other_attention

            refuse_other_attention(spec.model)
        sharded = layout.batch > 1 if layout.pp > 1 else self._shards(layout)
        if sharded and isinstance(spec.model, nn.Module):
            refuse_scalars(spec.model, self.name)
        if layout.tp == layout.pp == layout.ep == 1:
            return
        model = _skeleton(spec, layout, placement)
        # A session asks before it knows of any.
        if any(True for _ in model.parameters()):
            self._plans(model, layout)

    def placements(self, spec: EngineSpec, placement: Placement) -> list[tuple[str, str]]:
        """Say which layers are divided and where each parameter goes, for a dry run.

        Raises:
            ConfigError: the model cannot be divided.
        """
        from unipar_torch.placements import placements, remarks

        layout = self.layout(placement)
        model = _skeleton(spec, layout, placement)
        plan, stages, experts = self._plans(model, layout)
        said = [] if plan is None else list(remarks(plan))
        if stages is not None:
            from unipar_torch.stage_plan import describe

            style = STYLES.get(self.options.schedule, "loop")
            said += describe(model, stages, layout.pp, style)
        if experts is not None:
            from unipar_torch.expert_plan import remarks as remarks_of_experts

            said += remarks_of_experts(experts, layout.ep)
        return [*said, *placements(model, layout, plan, experts).items()]

    def prepare(self, spec: EngineSpec, world: World) -> StepEngine:
        self._casts |= spec.precision != "fp32" and self.options.param_dtype == "compute"
        # FSDP and DTensor take longer to import than torch, and only the workers need them.
        with no_collection():
            from unipar_torch.sharding import prepare

        options, layout = self.options, world.layout
        plan = stages = experts = None
        if not layout.tp == layout.pp == layout.ep == 1:
            # While a module has its values. Rounding may differ between machines, and plans must
            # not.
            model = _skeleton(spec, layout, world.placement)
            plan, stages, experts = world.broadcast(self._plans(model, layout))
        sequences = divide = loss = None
        sharded = self._shards(layout)
        if layout.cp > 1:
            from unipar_torch.context_parallel import ContextParallel

            sequences = ContextParallel(world, options.cp_kind, options.sequence_dims)
        if plan is not None:
            from unipar_torch.tensor_parallel import divide_layers

            if options.loss_parallel:
                from unipar_torch.loss_parallel import LossParallel

                loss = LossParallel()
            divide = functools.partial(
                divide_layers,
                plan=plan,
                world=world,
                sequence=options.sequence_parallel,
                overlapped=options.async_tp,
                loss=loss,
                # torch's loss scaler takes gradients of one kind (2.13, amp/grad_scaler.py).
                plain=not sharded and layout.pp == 1 and spec.precision != "fp16",
            )
        if stages is not None:
            from unipar_torch import pipeline

            return pipeline.prepare(spec, world, options, stages, divide)
        if experts is not None:
            from unipar_torch.expert_parallel import divide_experts

            divide = functools.partial(divide_experts, plan=experts, world=world)
        divided = () if experts is None else tuple(experts.experts)
        return prepare(
            spec,
            world,
            options,
            divide,
            sequences=sequences,
            experts=divided,
            loss=loss,
            sharded=sharded,
        )

    def _shards(self, layout: Layout) -> bool:
        """Whether FSDP divides a model that is not cut into stages."""
        return layout.tp == 1 or self.options.shards(layout)

    def _plans(self, model: nn.Module, layout: Layout) -> tuple[Any, Any, Any]:
        """How layers, stages and experts are divided; None where they are not."""
        options = self.options
        plan = stages = experts = None
        if layout.tp > 1:
            from unipar_torch.tensor_plan import blocks_by_name, make_plan

            plan = make_plan(model, layout.tp, options.plan)
            if options.loss_parallel:
                from unipar_torch.loss_parallel import refuse_without_logits

                refuse_without_logits(plan, blocks_by_name(model))
        if layout.pp > 1:
            from unipar_torch.stage_plan import plan_stages

            stages = plan_stages(model, options.num_stages, options.stages, options.pp)
        if layout.ep > 1:
            from unipar_torch.expert_plan import make_expert_plan

            experts = make_expert_plan(model, layout.ep, options.experts, efsdp=layout.efsdp)
        return plan, stages, experts

    def explain(self, error: BaseException) -> str:
        from unipar.engine.sharded import explain_sharded

        return (
            explain_sharded(error, self.name)
            or (explain_dtypes(error, self.name) if self._casts else "")
            or (_explain_left_behind(error) if self.options.tp > 1 else "")
        )


def _explain_left_behind(error: BaseException) -> str:
    """Explain torch's errors about tensors of runs that divide and check layers; empty for others.

    They are those of torch 2.13: of ``torch.Tensor.to`` and of its autograd engine.
    """
    if "Cannot copy out of meta tensor" in str(error):
        when = "to find what can be divided, on the meta device, where tensors have no values"
    elif "Trying to backward through the graph a second time" in str(error):
        when = "in the first pass, to compare them with themselves undivided"
    else:
        return ""
    return (
        f"{str(error).splitlines()[0][:160]} Under tp, mesh runs blocks of the model {when}, and "
        "calls their hooks. A block or a hook that puts tensors into a list, a dict or a cache "
        "outside of the model leaves those of such a run there, too. Keep them in an attribute of "
        "a module, or return them from the block."
    )


def _check_staged(spec: EngineSpec, pp: int) -> None:
    """Raise :class:`ConfigError` for what ``mesh`` does, but not where its ranks have stages."""
    for asked, given, instead in (
        (
            spec.activation_checkpointing == "selective",
            "activation_checkpointing='selective'",
            "activation_checkpointing='full' (which keeps nothing of a block)",
        ),
        (
            spec.activation_offload,
            "activation_offload=True",
            "activation_checkpointing='full', which keeps less",
        ),
        (spec.compile is not False, f"compile={spec.compile!r}", "compile=False"),
        (spec.parallelize is not None, "parallelize", "tp or dp_shard, which divide each stage"),
    ):
        if asked:
            raise ConfigError(
                f"strategy 'mesh': {given} is not supported with stages (pp={pp}), though it is "
                f"with pp=1. Use {instead}; or divide the model by other axes than pp, such as tp "
                "or dp_shard."
            )


def _skeleton(spec: EngineSpec, layout: Layout, placement: Placement) -> nn.Module:
    """The model, or what its function builds on the meta device."""
    if isinstance(spec.model, nn.Module):
        return spec.model
    context = ModelContext(layout, 0, placement.device)
    return on_meta(functools.partial(build_model, spec.model, context), "mesh")
