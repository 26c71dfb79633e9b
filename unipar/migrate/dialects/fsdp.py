"""FSDP by hand: FullyShardedDataParallel, and fully_shard."""

from __future__ import annotations

from typing import ClassVar

import libcst as cst

from unipar.migrate.devices import rewrite_environment
from unipar.migrate.dialects.base import Dialect, Row
from unipar.migrate.dialects.fsdp_options import MESH
from unipar.migrate.dialects.fsdp_states import CHECKPOINT, States
from unipar.migrate.dialects.fsdp_wrapping import PACKAGES, SHARD, Wrapping
from unipar.migrate.dialects.torch import (
    LOOP_REFUSED,
    LOOP_ROWS,
    NORM_ROW,
    check_trains,
    rewrite_training,
)
from unipar.migrate.literals import argument, constant
from unipar.migrate.loaders import rewrite_samplers
from unipar.migrate.models import DDP, FSDP, find_optimizers, holds_wrapper
from unipar.migrate.numerics import seeds_of_ranks, warn_of_ranks
from unipar.migrate.plan import Clip, Plan
from unipar.migrate.precision import AUTOCAST
from unipar.migrate.processes import is_conditional, rewrite_group, rewrite_spawn
from unipar.migrate.source import Source
from unipar.migrate.tracing import leaves, sweep
from unipar.migrate.tree import inside

_CLIP = ("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad.clip_grad_norm_")
_SCALER = "torch.distributed.fsdp.sharded_grad_scaler."
_SETTINGS = ("MixedPrecision", "MixedPrecisionPolicy", "CPUOffload", "CPUOffloadPolicy",
             "OffloadPolicy", "ModuleWrapPolicy", "FullStateDictConfig", "ShardedStateDictConfig",
             "FullOptimStateDictConfig", "ShardedOptimStateDictConfig", "StateDictOptions",
             "init_device_mesh", "partial", "dict")  # fmt: skip
_MODULE = tuple(f"{package}FSDPModule" for package in PACKAGES)
# Methods of FSDPModule that say when to communicate, which an engine decides.
_TIMING = ("set_requires_gradient_sync", "set_is_last_backward", "set_reshard_after_backward",
           "set_reshard_after_forward", "set_modules_to_forward_prefetch",
           "set_modules_to_backward_prefetch", "set_unshard_in_backward", "unshard",
           "reshard")  # fmt: skip
_STRANGE = ("set_gradient_divide_factor", "set_reduce_scatter_divide_factor",
            "set_requires_all_reduce", "set_all_reduce_hook", "register_comm_hook",
            "set_custom_all_gather", "set_custom_reduce_scatter", "rekey_optim_state_dict",
            "to_empty", "reset_parameters")  # fmt: skip


class Fsdp(Dialect):
    """A script that divides its model with FSDP 1 or 2."""

    name: ClassVar[str] = "fsdp"
    title: ClassVar[str] = "FSDP"
    marks: ClassVar[tuple[str, ...]] = PACKAGES
    rows: ClassVar[tuple[Row, ...]] = (
        Row("FSDP(model, ...), fully_shard(model)", "model; the options go to unipar.yaml"),
        Row("fully_shard(layer), layer = FSDP(layer)", "removed: the strategy finds the blocks"),
        Row("auto_wrap_policy=ModuleWrapPolicy({Block})", "wrap: [Block]"),
        Row("size_based_auto_wrap_policy, min_num_params=1000", "wrap_min_params: 1000"),
        Row("sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, reshard_after_forward=False",
            "sharding: grad_op"),
        Row("ShardingStrategy.HYBRID_SHARD, init_device_mesh(\"cuda\", (2, 8))",
            "sharding: hybrid, shard_size: 8"),
        Row("ShardingStrategy.NO_SHARD", "strategy: ddp"),
        Row("MixedPrecision, MixedPrecisionPolicy", "precision: bf16, reduce_dtype: bf16"),
        Row("torch.autocast without them", "precision: bf16, param_dtype: fp32"),
        Row("CPUOffload(True), CPUOffloadPolicy()", "cpu_offload: true"),
        Row("ShardedGradScaler", "removed: the engine scales under precision: fp16"),
        Row("model.clip_grad_norm_(1.0)", "max_grad_norm=1.0 in script.prepare"),
        Row("with model.no_sync():", "with script.no_sync():"),
        Row("model.set_requires_gradient_sync(last), model.unshard()",
            "removed: an engine knows when to reduce and gather"),
        Row("with FSDP.state_dict_type(model, FULL_STATE_DICT, ...):", "removed"),
        Row("model.state_dict(), get_model_state_dict(model)",
            "script.gathered(model).state_dict()"),
        Row("FSDP.optim_state_dict(model, optimizer), get_optimizer_state_dict(model, optimizer)",
            "script.gathered(optimizer).state_dict()"),
        Row("FSDP.optim_state_dict_to_load(model, optimizer, state)", "state"),
        Row("set_model_state_dict(model, state), set_optimizer_state_dict(model, optimizer, s)",
            "script.gathered(model).load_state_dict(state), "
            "script.gathered(optimizer).load_state_dict(s)"),
        Row("value.full_tensor() of a state dict", "value: it is whole"),
        Row("init_process_group, destroy_process_group, LOCAL_RANK, DistributedSampler, mp.spawn",
            "as [of DDP scripts](ddp.md)"),
        *LOOP_ROWS,
        NORM_ROW,
    )  # fmt: skip

    refused: ClassVar[tuple[Row, ...]] = (
        Row("with torch.device(\"meta\"), to_empty, param_init_fn",
            "How weights begin is the strategy's. Build the model where it trains."),
        Row("ignored_modules, ignored_params, shard_placement_fn, process_group",
            "unipar.yaml cannot say them. Leave them out."),
        Row("FSDP(...) if args.fsdp else DDP(...)",
            "Divide it always; unipar.yaml's strategy decides."),
        Row("lambda_auto_wrap_policy, CustomPolicy, enable_wrap",
            "Use ModuleWrapPolicy({Block}) or size_based_auto_wrap_policy."),
        Row("LOCAL_STATE_DICT, optimizer.state_dict()",
            "One rank's part. Use FSDP.optim_state_dict or get_optimizer_state_dict."),
        Row("if rank == 0: model.state_dict()",
            "All ranks put a whole state dict together. Take it on all, and save it on rank 0."),
        Row("summon_full_params, register_comm_hook, set_gradient_divide_factor",
            "These are FSDP's own."),
        Row("mesh[\"tp\"], parallelize_module, distribute_tensor",
            "Other divisions than data parallelism's. Port this by hand "
            "(docs/how-to/own-loop.md)."),
        *LOOP_REFUSED,
    )  # fmt: skip

    def rewrite(self, plan: Plan) -> None:
        if not plan.calls(*FSDP, *SHARD) and not plan.methods("backward"):
            return  # A file of settings by itself trains nothing.
        find_optimizers(plan)
        check_trains(plan)
        plan.launcher = "torchrun"
        spawned = rewrite_spawn(plan)
        if spawned:
            plan.launcher = "python"
        joined = rewrite_group(plan, spawned=spawned)
        first = bool(plan.calls(*FSDP))
        wrapping = Wrapping(plan)
        wrapping.rewrite()
        self._keep_autocast_apart(plan)
        if not joined:
            self._join(plan, wrapping)
        self._rewrite_methods(plan, wrapping)
        self._warn_of_clipping(plan, wrapped=first)
        States(plan, wrapping.gone).rewrite()
        rewrite_training(plan, wrapped=first)
        rewrite_environment(plan)
        rewrite_samplers(plan)
        warn_of_ranks(plan)
        self._warn_of_seeds(plan)
        self._clear_away(plan, wrapping)

    def _keep_autocast_apart(self, plan: Plan) -> None:
        """Under autocast alone FSDP gathers fp32 weights, and casts them where they are used."""
        strategy = plan.config.get("strategy")
        if "precision" not in plan.config and plan.calls(*AUTOCAST) and strategy != "ddp":
            options = strategy if isinstance(strategy, dict) else {"name": "fsdp"}
            plan.config["strategy"] = {**options, "param_dtype": "fp32"}
        if plan.config.get("precision") == "fp16" and not plan.calls(f"{_SCALER}ShardedGradScaler"):
            for _, call in plan.calls(*FSDP, *SHARD)[-1:]:
                plan.refuse(
                    call,
                    "fp16 without a ShardedGradScaler: gradients below 6e-8 become zero, which an "
                    "engine's scaler prevents, so training would change.",
                    "Add ShardedGradScaler, or use bfloat16.",
                )

    def _join(self, plan: Plan, wrapping: Wrapping) -> None:
        """A device mesh joins the processes where nothing else does."""
        meshes = plan.calls(*MESH)
        if not meshes:
            for _, call in plan.calls(*FSDP, *SHARD)[:1]:
                plan.refuse(
                    call, "no init_process_group is seen.",
                    "Give migrate the file that calls it too.",
                )  # fmt: skip
            return
        source, call = meshes[0]
        assign = source.parent(call)
        if is_conditional(source, call) or not isinstance(assign, cst.Assign):
            plan.refuse(call, "whether the run is distributed is decided while it runs.",
                        "Call it always, and give it a name.")  # fmt: skip
            return
        wrapping.gone.append((source, source.span(call)))
        plan.replace(call, "script.open()")
        plan.handled.add(call)

    def _rewrite_methods(self, plan: Plan, wrapping: Wrapping) -> None:
        for source in plan.sources:
            for node in source.all(cst.Attribute):
                if plan.flow.values(node.value) & plan.models:
                    self._rewrite_attribute(plan, source, node, wrapping)
        for source in plan.sources:
            for assertion in source.all(cst.Assert):
                if any(n in (*FSDP, *_MODULE) for one in inside(assertion.test)
                       for n in plan.flow.names(one)):  # fmt: skip
                    wrapping.gone.append((source, source.span(assertion)))
                    source.remove(assertion)
        for _, call, func in plan.methods(*_TIMING):
            if call in plan.handled or self._is_named(plan, func):
                continue
            plan.handled.add(call)
            plan.drop(call)
        for _, call in plan.calls(*DDP):
            plan.refuse(call, "one script with DDP and FSDP.", "Keep one: unipar.yaml decides.")

    def _is_named(self, plan: Plan, func: cst.Attribute) -> bool:
        """Return whether a method of this name is the program's own."""
        return bool(plan.flow.functions(func) or plan.flow.names(func))

    def _rewrite_attribute(
        self, plan: Plan, source: Source, node: cst.Attribute, wrapping: Wrapping
    ) -> None:
        name, above = node.attr.value, source.parent(node)
        call = above if isinstance(above, cst.Call) and above.func is node else None
        if name == "module" and holds_wrapper(plan.flow, node.value):
            plan.replace(node, node.value)
        elif name == "no_sync" and call is not None:
            plan.replace(node, "script.no_sync")
            plan.handled.add(call)
        elif name == "clip_grad_norm_" and call is not None:
            norm, kind = argument(call, 0, "max_norm"), argument(call, 1, "norm_type")
            plan.clips[call] = Clip(norm, kind, node.value)
        elif name in _STRANGE and call is not None and not plan.flow.functions(node):
            plan.refuse(
                node, "an engine has nothing like it."
                if name not in ("to_empty", "reset_parameters")
                else "how weights begin is the strategy's.",
                "Leave it out." if name not in ("to_empty", "reset_parameters")
                else "Build the model where it trains, without torch.device('meta').",
            )  # fmt: skip

    def _warn_of_clipping(self, plan: Plan, *, wrapped: bool) -> None:
        for _, call in plan.calls(*_CLIP) if wrapped else ():
            plan.warn(
                call,
                "each rank clips its part of the gradient by that part's norm, so ranks scale "
                "differently, and less than is asked for: a part's norm is about 1/sqrt(n) of "
                "the whole on n ranks. Now the whole is clipped by its norm.",
                "This fixes it; model.clip_grad_norm_ would have.",
            )

    def _warn_of_seeds(self, plan: Plan) -> None:
        """Where ranks build other weights, FSDP begins with a part of each rank's."""
        for _, call in plan.calls(*FSDP, *SHARD) if seeds_of_ranks(plan) else ():
            model = argument(call, 0, "module")
            synced = constant(argument(call, None, "sync_module_states")) is True
            if not synced and model is not None and plan.flow.values(model) & plan.models:
                plan.warn(
                    call,
                    "if ranks have built it under seeds of their own, FSDP began with parts of "
                    "different models; rank 0's weights are taken for all now.",
                    "Seed all ranks alike while the model is built, if that was not meant.",
                )

    def _clear_away(self, plan: Plan, wrapping: Wrapping) -> None:
        """Take out settings that nobody needs now, and refuse what else is FSDP's."""
        made = [
            call for source in plan.sources for call in source.all(cst.Call)
            if call not in plan.handled or not self._is_gone(source, call, wrapping)
            if self._is_setting(plan, call)
        ]  # fmt: skip
        for call in sweep(plan, made, wrapping.gone):
            if self._of_packages(plan, call):
                wrapping.gone.append((plan.flow.source(call), plan.flow.source(call).span(call)))
                plan.tell(
                    call, "unipar.yaml says this now; what is left here has no effect.",
                    "Take it out.",
                )  # fmt: skip
        scalers = {f"{_SCALER}ShardedGradScaler", _SCALER[:-1]}
        for node in leaves(plan, wrapping.gone, *PACKAGES, CHECKPOINT):
            source = plan.flow.source(node)
            if plan.flow.names(node) <= scalers or isinstance(source.parent(node), cst.Annotation):
                continue
            plan.refuse(
                node, "this is FSDP's own; an engine has nothing like it.",
                "Leave it out, or port this by hand (docs/how-to/own-loop.md).",
            )  # fmt: skip
        for source in plan.sources:
            for item in source.all(cst.WithItem):
                given = item.item.args if isinstance(item.item, cst.Call) else ()
                named = isinstance(item.item, cst.Call) and "torch.device" in plan.flow.names(
                    item.item.func
                )
                if named and given and constant(given[0].value) == "meta":
                    plan.refuse(
                        item, "how weights begin is the strategy's.",
                        "Build the model where it trains, without torch.device('meta').",
                    )  # fmt: skip

    def _is_gone(self, source: Source, call: cst.Call, wrapping: Wrapping) -> bool:
        start, stop = source.span(call)
        return any(p is source and s[0] <= start and stop <= s[1] for p, s in wrapping.gone)

    def _is_setting(self, plan: Plan, call: cst.Call) -> bool:
        names = {name.rpartition(".")[2] for name in plan.flow.names(call.func)}
        return bool(names & set(_SETTINGS)) and self._of_packages(plan, call)

    def _of_packages(self, plan: Plan, call: cst.Call) -> bool:
        """Return whether a call, or what it is given, is of FSDP."""
        values = [call.func, *(one.value for one in call.args)]
        return any(
            name.startswith((*PACKAGES, CHECKPOINT)) or name in MESH
            for one in values
            for name in (*plan.flow.names(one), *(v.name for v in plan.flow.values(one)))
        )
