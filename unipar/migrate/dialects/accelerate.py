"""Hugging Face Accelerate."""

from __future__ import annotations

from typing import ClassVar

import libcst as cst

from unipar.migrate.dialects.accelerate_files import read_files
from unipar.migrate.dialects.accelerate_names import rewrite_names
from unipar.migrate.dialects.accelerate_settings import (
    ACCELERATOR,
    rewrite_accelerators,
)
from unipar.migrate.dialects.accelerate_uses import (
    check_backwards,
    rewrite_uses,
    warn_of_double_division,
)
from unipar.migrate.dialects.base import Dialect, Row
from unipar.migrate.dialects.torch import LOOP_REFUSED, LOOP_ROWS, check_trains, rewrite_training
from unipar.migrate.imports import imported
from unipar.migrate.models import find_optimizers
from unipar.migrate.plan import Plan, Words
from unipar.migrate.rank_divergence import refuse_lone_saves

_REPLACED = ("model(x)", "loss.backward()", "optimizer.step()", "clip_grad_norm_(",
             "GradScaler", "torch.autocast(")  # fmt: skip


class Accelerate(Dialect):
    """A script that prepares its objects with an ``Accelerator``."""

    name: ClassVar[str] = "accelerate"
    title: ClassVar[str] = "Accelerate"
    marks: ClassVar[tuple[str, ...]] = ("accelerate.",)
    rows: ClassVar[tuple[Row, ...]] = (
        Row("Accelerator(mixed_precision=\"bf16\", gradient_accumulation_steps=4)",
            "accelerated.Run(gradient_accumulation_steps=4), and precision: bf16 in unipar.yaml"),
        Row("Accelerator(cpu=True)", "device: cpu in unipar.yaml"),
        Row("DistributedDataParallelKwargs, DeepSpeedPlugin, FullyShardedDataParallelPlugin",
            "options of strategy: accelerate in unipar.yaml"),
        Row("the file of accelerate config beside the script",
            "the same, and device and precision"),
        Row("ProjectConfiguration, GradientAccumulationPlugin, DataLoaderConfiguration",
            "arguments of accelerated.Run"),
        Row("accelerator.prepare(model), accelerator.prepare(optimizer)", "removed"),
        Row("accelerator.prepare(loader)", "accelerator.deal(loader)"),
        Row("accelerator.prepare(scheduler)", "accelerator.pace(scheduler)"),
        Row("model(x)", "accelerated.engine(model)(x)"),
        Row("accelerator.backward(loss)", "accelerated.backward(loss, optimizer)"),
        Row("optimizer.step()", "accelerated.step(optimizer)"),
        Row("accelerator.clip_grad_norm_(model.parameters(), 1.0)",
            "max_grad_norm=1.0 in script.prepare"),
        Row("accelerator.unwrap_model(model)", "model: it is not wrapped"),
        Row("accelerator.accumulate(model), sync_gradients, gather_for_metrics(t), gather(t), "
            "reduce(t), print(...), is_main_process, wait_for_everyone(), set_trigger(), "
            "check_trigger(), device", "unchanged"),
        Row("accelerator.save_state(path), load_state(path), save(...), save_model(...), "
            "init_trackers(...), log(...), end_training()", "unchanged"),
        Row("accelerator.distributed_type == DistributedType.XLA", "False"),
        Row("set_seed(0), get_logger(__name__), skip_first_batches(loader, 3)",
            "accelerated.set_seed(0), accelerated.get_logger(__name__), "
            "accelerated.skip_first_batches(loader, 3)"),
        *(row for row in LOOP_ROWS if not row.before.startswith(_REPLACED)),
    )  # fmt: skip

    refused: ClassVar[tuple[Row, ...]] = (
        Row("zero_grad() before accelerator.backward(loss) under accumulate()",
            "All micro-batches but the last are thrown away. Call it after the step."),
        Row("clip_grad_norm_ under accumulate() without `if accelerator.sync_gradients:`",
            "It clips what is there after each micro-batch. Add the condition."),
        Row("norm = accelerator.clip_grad_norm_(...)",
            "The strategy clips in the step. StepResult.grad_norm is the norm."),
        Row("accelerator.prepare(*objects)", "Write out what is prepared."),
        Row("a model or an optimizer that is not prepared",
            "Replicas drift apart; steps are taken at every micro-batch. Prepare it."),
        Row("loss.backward() in an accumulation, or under fp16",
            "It is neither divided nor scaled. Call accelerator.backward(loss)."),
        Row("a second Accelerator, but in another branch",
            "It shares the state of the first. Build one, and hand it on."),
        Row("accelerator.backward(loss, retain_graph=True)",
            "An engine's backward takes a loss and nothing else."),
        Row("accelerator.distributed_type == DistributedType.MULTI_GPU, "
            "accelerator.state.deepspeed_plugin, trackers, get_tracker, "
            "split_between_processes, join_uneven_inputs, profile, "
            "register_save_state_pre_hook",
            "These are Accelerate's own. Leave them out, or port them by hand."),
        Row("if accelerator.is_main_process: accelerator.save_state(path)",
            "All ranks write it together, and would wait for ever. Let all come to it."),
        Row("PartialState, accelerate.utils.gather", "Use the Accelerator's methods."),
        Row("notebook_launcher(train, num_processes=2)",
            "Call train(): a notebook is one process. torchrun starts several of a script."),
        Row("Accelerator(rng_types=..., dynamo_backend=..., mixed_precision=\"fp8\")",
            "unipar has no counterpart. Leave it out."),
        *LOOP_REFUSED,
    )  # fmt: skip

    def rewrite(self, plan: Plan) -> None:
        find_optimizers(plan)
        plan.launcher = "torchrun"
        plan.words = Words("accelerated.backward", ("accelerated.step(", ")"), "accelerated.engine")
        if not plan.calls(*ACCELERATOR):
            _refuse_unbuilt(plan)
            return
        trains = check_trains(plan)
        rewrite_accelerators(plan)
        read_files(plan)
        rewrite_uses(plan)
        refuse_lone_saves(plan, ("save_state", "save_model"), *ACCELERATOR)
        if trains:
            check_backwards(plan)
            warn_of_double_division(plan)
            device = plan.config.pop("device", None)
            rewrite_training(plan, wrapped=False)
            # Accelerate takes the GPU where there is one, whatever tensors the script moves.
            plan.config.pop("device", None)
            if device is not None:
                plan.config["device"] = device
        rewrite_names(plan)


def _refuse_unbuilt(plan: Plan) -> None:
    for source in plan.sources:
        for node in (*source.all(cst.Import), *source.all(cst.ImportFrom)):
            if any(one.startswith("accelerate") for one in imported(node)):
                plan.refuse(
                    node, "no Accelerator is seen to be built.",
                    "Give migrate the file that builds it too.",
                )  # fmt: skip
