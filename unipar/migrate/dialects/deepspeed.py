"""DeepSpeed: ``deepspeed.initialize`` and the engine that it gives."""

from __future__ import annotations

from typing import ClassVar

import libcst as cst

from unipar.migrate.averages import warn_of_means
from unipar.migrate.devices import rewrite_devices, rewrite_environment
from unipar.migrate.dialects.base import Dialect, Row
from unipar.migrate.dialects.deepspeed_engine import ENGINE, check_engines
from unipar.migrate.dialects.deepspeed_initialize import rewrite_initialize, take_factories
from unipar.migrate.dialects.deepspeed_optimizers import rewrite_own_optimizers
from unipar.migrate.dropping import warn_of_dropped
from unipar.migrate.leftovers import Leftovers
from unipar.migrate.loaders import rewrite_samplers
from unipar.migrate.models import find_optimizers, rewrite_optimizers
from unipar.migrate.numerics import warn_of_ranks
from unipar.migrate.plan import Plan
from unipar.migrate.processes import is_conditional, rewrite_group
from unipar.migrate.refusals import REFUSED, refuse_names

_INIT = ("deepspeed.init_distributed", "deepspeed.comm.init_distributed",
         "deepspeed.comm.comm.init_distributed")  # fmt: skip
_COLLECTIVES = ("get_rank", "get_world_size", "barrier", "all_reduce", "all_gather", "broadcast",
                "all_gather_object", "broadcast_object_list", "reduce", "is_initialized",
                "ReduceOp")  # fmt: skip
_ACCELERATOR = ("deepspeed.get_accelerator", "deepspeed.accelerator.get_accelerator",
                "deepspeed.accelerator.real_accelerator.get_accelerator")  # fmt: skip
_DEVICE = ("device_name", "current_device_name", "current_device", "device")
_REFUSED = {
    "pipe.": ("pipeline parallelism.", "Port it to unipar's strategy colossalai."),
    "PipelineModule": ("pipeline parallelism.", "Port it to unipar's strategy colossalai."),
    "moe.": ("experts are divided among ranks.", "Leave them whole."),
    "checkpointing.": ("activations are recomputed by DeepSpeed.",
                       "Use torch.utils.checkpoint in the model."),
    "zero.GatheredParameters": ("parameters are looked at while they are divided.",
                                "Set them before deepspeed.initialize, or use script.gathered."),
    "init_inference": ("it does not train.", "Leave it in a script of its own."),
}  # fmt: skip
_OWN = ("this is DeepSpeed's own, and has no counterpart under other strategies.",
        "Leave it out, or do it with torch or torch.distributed.")  # fmt: skip


class DeepSpeed(Dialect):
    """A script whose model ``deepspeed.initialize`` takes."""

    name: ClassVar[str] = "deepspeed"
    title: ClassVar[str] = "DeepSpeed"
    marks: ClassVar[tuple[str, ...]] = ("deepspeed.",)
    engines: ClassVar[tuple[str, ...]] = (ENGINE,)
    rows: ClassVar[tuple[Row, ...]] = (
        Row("deepspeed.initialize(model=model, optimizer=optimizer, config=config)",
            "stepped.initialize(model, optimizer=optimizer, ...)"),
        Row("config={...}, \"ds_config.json\", json.load(file), --deepspeed_config",
            "unipar.yaml, and the call's arguments"),
        Row("zero_optimization", "stage and the options of the strategy deepspeed"),
        Row("fp16, bf16, torch_autocast", "precision in unipar.yaml"),
        Row("gradient_clipping", "max_grad_norm; 1.0 where it is not set, as DeepSpeed has it"),
        Row("train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps",
            "train_batch_size, micro_batch_size, accumulation_steps of the call"),
        Row("optimizer and model_parameters=model.parameters()",
            "optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.1)"),
        Row("scheduler: WarmupLR, WarmupDecayLR",
            "lr_scheduler=lambda optimizer: stepped.Warmup(optimizer, num_steps=100)"),
        Row("FusedAdam, DeepSpeedCPUAdam", "torch.optim.AdamW, torch.optim.Adam"),
        Row("engine(x), engine.backward(loss), engine.step()", "unchanged"),
        Row("engine.is_gradient_accumulation_boundary(), engine.global_steps, engine.device",
            "unchanged"),
        Row("engine.save_checkpoint(d, tag), engine.load_checkpoint(d)",
            "unchanged; the files are unipar's"),
        Row("engine.module.state_dict()", "script.whole(engine.module).state_dict()"),
        Row("deepspeed.init_distributed()", "script.open()"),
        Row("deepspeed.comm.all_reduce(t), get_rank()", "torch.distributed's"),
        Row("deepspeed.add_config_arguments(parser)",
            "stepped.add_config_arguments(parser): accepted, and means nothing"),
        Row("args.local_rank, int(os.environ[\"LOCAL_RANK\"])", "script.placement().local_rank"),
        Row("get_accelerator().device_name()", "str(script.device())"),
    )  # fmt: skip

    refused: ClassVar[tuple[Row, ...]] = (
        Row("\"stage\": args.stage, \"enabled\": args.fp16",
            "Decided while it runs. Write a value; unipar.yaml decides then."),
        Row("config[\"a\"] = b", "The configuration is changed after it was written."),
        Row("\"auto\"", "Write a number."),
        Row("loss.backward(), model(x) after initialize", "Go through the engine."),
        Row("engine.zero_grad(), engine.allreduce_gradients()",
            "An engine clears and reduces by itself. Leave them out."),
        Row("OneBitAdam, Lamb, Lion, Muon", "DeepSpeed's own. Use an optimizer of torch."),
        Row("OneCycle, LRRangeTest, WarmupCosineLR",
            "DeepSpeed's own. Use WarmupLR, WarmupDecayLR, or one of torch."),
        Row("PipelineModule, moe, sequence and tensor parallelism",
            "Port it to another strategy by hand."),
        Row("zero.GatheredParameters", "Set parameters before deepspeed.initialize."),
        Row("curriculum_learning, compression_training, sparse_attention",
            "unipar.yaml cannot say them."),
        *(Row(name, f"{why[0].upper()}{why[1:]} {todo}") for name, (why, todo) in REFUSED.items()),
    )  # fmt: skip

    def rewrite(self, plan: Plan) -> None:
        plan.launcher = "torchrun"
        left = Leftovers(plan, "deepspeed")
        if left.refuse_without("deepspeed.initialize(...)", "deepspeed.initialize"):
            return
        take_factories(plan)
        find_optimizers(plan)
        refuse_names(plan)
        rewrite_own_optimizers(plan, left)
        rewrite_initialize(plan, left)
        rewrite_optimizers(plan, {})
        asked = check_engines(plan)
        self._rewrite_group(plan, left)
        asked |= self._rewrite_devices(plan, left)
        self._unwrap(plan, left)
        rewrite_samplers(plan)
        rewrite_devices(plan)
        if asked:
            plan.config.pop("device", None)
        rewrite_environment(plan)
        _rewrite_local_rank(plan)
        warn_of_ranks(plan)
        warn_of_means(plan)
        warn_of_dropped(plan)
        for name, (why, todo) in _REFUSED.items():
            left.refuse_below(f"deepspeed.{name}", why, todo)
        left.refuse(*_OWN)
        left.remove_imports()

    def _rewrite_group(self, plan: Plan, left: Leftovers) -> None:
        rewrite_group(plan, spawned=False)
        for source, call in plan.calls(*_INIT):
            if is_conditional(source, call):
                plan.refuse(
                    call,
                    "whether the run is distributed is decided while it runs.",
                    "Call it always: without a launcher unipar runs one process just so.",
                )
            plan.replace(call, "script.open()")
            left.settle(call)
        for _, call in plan.calls("deepspeed.comm.destroy_process_group"):
            plan.replace(call, "script.close()")
            left.settle(call)
        for _, call in plan.calls("deepspeed.comm.get_local_rank"):
            plan.replace(call, "script.placement().local_rank")
            left.settle(call)
        for source in plan.sources:
            for node in (*source.all(cst.Attribute), *source.all(cst.Name)):
                for name in plan.flow.names(node):
                    last = name.rpartition(".")[2]
                    own = name in (f"deepspeed.comm.{last}", f"deepspeed.comm.comm.{last}")
                    parent = source.parent(node)
                    if not own or last not in _COLLECTIVES or isinstance(
                        parent, (cst.ImportAlias, cst.AsName)
                    ):  # fmt: skip
                        continue
                    plan.replace(node, f"torch.distributed.{last}")
                    plan.use(source, "import torch.distributed")
                    left.settle(node)

    def _rewrite_devices(self, plan: Plan, left: Leftovers) -> bool:
        found = False
        for source, call in plan.calls(*_ACCELERATOR):
            attribute = source.parent(call)
            outer = source.parent(attribute) if isinstance(attribute, cst.Attribute) else None
            if not isinstance(attribute, cst.Attribute) or not isinstance(outer, cst.Call):
                continue
            if attribute.attr.value in _DEVICE:
                found = True
                plan.replace(outer, "str(script.device())")
                left.settle(outer)
            elif attribute.attr.value in ("set_device", "empty_cache"):
                plan.drop(outer)
                left.settle(outer)
        return found

    def _unwrap(self, plan: Plan, left: Leftovers) -> None:
        for source, call in plan.calls("deepspeed.zero.Init"):
            item = source.parent(call)
            with_ = source.parent(item) if item is not None else None
            if not isinstance(with_, cst.With):
                continue
            plan.tell(call, "each rank makes the whole model before it is divided.")
            if len(with_.items) > 1 or not source.unwrap(with_):
                plan.replace(call, "contextlib.nullcontext()")
                plan.use(source, "import contextlib")
            left.settle(call)


def _rewrite_local_rank(plan: Plan) -> None:
    """Ask the run instead of ``args.local_rank``, which DeepSpeed's launcher alone gives."""
    for source in plan.sources:
        for node in source.all(cst.Attribute):
            if node.attr.value != "local_rank" or isinstance(source.parent(node), cst.AssignTarget):
                continue
            for one in plan.flow.values(node.value):
                func = one.node.func if isinstance(one.node, cst.Call) else None
                if isinstance(func, cst.Attribute) and func.attr.value.startswith("parse_"):
                    plan.replace(node, "script.placement().local_rank")
