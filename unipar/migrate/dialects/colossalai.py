"""Colossal-AI's Booster."""

from __future__ import annotations

from typing import ClassVar

import libcst as cst

from unipar.migrate.dialects.base import Dialect, Row
from unipar.migrate.dialects.colossalai_plugins import BOOSTER, rewrite_boosters
from unipar.migrate.dialects.colossalai_uses import SAVES, rewrite_names, rewrite_uses
from unipar.migrate.dialects.torch import LOOP_REFUSED, LOOP_ROWS, check_trains, rewrite_training
from unipar.migrate.imports import imported
from unipar.migrate.leftovers import Leftovers
from unipar.migrate.loaders import rewrite_samplers
from unipar.migrate.models import find_optimizers
from unipar.migrate.numerics import warn_of_ranks
from unipar.migrate.plan import Plan
from unipar.migrate.rank_divergence import refuse_lone_saves


class ColossalAI(Dialect):
    """A script that boosts its model."""

    name: ClassVar[str] = "colossalai"
    title: ClassVar[str] = "Colossal-AI"
    marks: ClassVar[tuple[str, ...]] = ("colossalai.",)
    rows: ClassVar[tuple[Row, ...]] = (
        Row("colossalai.launch_from_torch(seed=42)", "boosted.launch(seed=42)"),
        Row("TorchDDPPlugin(...), LowLevelZeroPlugin(stage=2), GeminiPlugin(...), "
            "TorchFSDPPlugin(...), HybridParallelPlugin(tp_size=2)",
            "strategy: colossalai in unipar.yaml, with plugin and its options"),
        Row("Booster(plugin=plugin)", "removed"),
        Row("LowLevelZeroPlugin(precision=\"bf16\", max_norm=1.0)",
            "precision: bf16 in unipar.yaml, max_grad_norm=1.0 in script.prepare"),
        Row("booster.boost(model, optimizer, criterion, loader, scheduler)", "removed"),
        Row("booster.backward(loss, optimizer), optimizer.backward(loss)",
            "script.backward(loss, optimizer)"),
        Row("with booster.no_sync(model):", "with script.no_sync():"),
        Row("optimizer.clip_grad_by_norm(1.0)", "max_grad_norm=1.0 in script.prepare"),
        Row("plugin.prepare_dataloader(data, batch_size=8, shuffle=True)",
            "boosted.loader(data, batch_size=8, shuffle=True)"),
        Row("HybridAdam(model.parameters(), lr=1e-3), CPUAdam, FusedAdam",
            "torch.optim.AdamW(..., lr=1e-3, weight_decay=0.0) in script.prepare"),
        Row("booster.save_model(model, path), load_model, save_optimizer, load_optimizer, "
            "save_lr_scheduler, load_lr_scheduler",
            "boosted.save_model(model, path), …"),
        Row("DistCoordinator(), get_dist_logger()",
            "boosted.Coordinator(), boosted.get_dist_logger()"),
        Row("get_accelerator().get_current_device(), get_current_device()", "script.device()"),
        Row("get_accelerator().max_memory_allocated(), empty_cache()",
            "torch.cuda.max_memory_allocated(), …"),
        Row("disable_existing_loggers()", "removed"),
        Row("def train(booster: Booster)", "def train(booster: None)"),
        *(row for row in LOOP_ROWS if not row.before.startswith(("loss.backward", "GradScaler",
                                                                "torch.autocast"))),
    )  # fmt: skip

    refused: ClassVar[tuple[Row, ...]] = (
        Row("booster.execute_pipeline(...), HybridParallelPlugin(pp_size=2)",
            "A pipeline's schedule takes whole steps. Port it to engine.train_step by hand."),
        Row("if args.plugin == \"gemini\": plugin = ...",
            "Build one, unconditionally; unipar.yaml's strategy is where to choose."),
        Row("colossalai.launch(rank=..., world_size=..., host=..., port=...)",
            "Start the processes with torchrun, and call launch_from_torch."),
        Row("LowLevelZeroPlugin(cpu_offload=True), HybridParallelPlugin(zero_stage=1), "
            "custom_policy=...",
            "unipar.yaml cannot say it. Leave it out."),
        Row("HybridAdam(..., bias_correction=False), nvme_offload_fraction=...",
            "torch.optim.AdamW has none. Leave it out."),
        Row("if coordinator.is_master(): booster.save_model(model, path)",
            "All ranks write it together, and would wait for ever. Let all come to it."),
        Row("LazyInitContext, colossalai.nn.lr_scheduler, enable_lora, colossalai.shardformer",
            "These are Colossal-AI's own. Use torch's, or leave them out."),
        *LOOP_REFUSED,
    )  # fmt: skip

    def rewrite(self, plan: Plan) -> None:
        find_optimizers(plan)
        plan.launcher = "torchrun"
        if not plan.calls(*BOOSTER):
            _refuse_unbuilt(plan)
            return
        left = Leftovers(plan, "colossalai")
        rewrite_uses(plan, left)
        refuse_lone_saves(plan, SAVES, *BOOSTER)
        rewrite_boosters(plan, left)
        rewrite_names(plan, left)
        if check_trains(plan):
            rewrite_training(plan, wrapped=False)
        # Boosters take the GPU where there is one, whatever tensors the script moves.
        plan.config.pop("device", None)
        rewrite_samplers(plan)
        warn_of_ranks(plan)
        left.refuse(
            "this is Colossal-AI's own; unipar has no counterpart.",
            "Use torch's, or leave it out.",
        )
        left.remove_imports()


def _refuse_unbuilt(plan: Plan) -> None:
    for source in plan.sources:
        for node in (*source.all(cst.Import), *source.all(cst.ImportFrom)):
            if any(one.startswith("colossalai") for one in imported(node)):
                plan.refuse(
                    node, "no Booster is seen to be built.",
                    "Give migrate the file that builds it too; older interfaces are not read.",
                )  # fmt: skip
