"""What DeepSpeed's configuration becomes: ``unipar.yaml``, and arguments of the call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import libcst as cst

from unipar.migrate.dialects.deepspeed_config import Config, settled
from unipar.migrate.plan import Plan

_BATCH = {
    "train_batch_size": "train_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "accumulation_steps",
}
# An option of the strategy, and from which stage on it means something.
_ZERO = {
    "overlap_comm": ("overlap_comm", 1),
    "reduce_bucket_size": ("reduce_bucket_size", 0),
    "allgather_bucket_size": ("allgather_bucket_size", 0),
    "contiguous_gradients": ("contiguous_gradients", 1),
    "round_robin_gradients": ("round_robin_gradients", 1),
    "stage3_prefetch_bucket_size": ("prefetch_bucket_size", 3),
    "stage3_param_persistence_threshold": ("persistence_threshold", 3),
    "stage3_max_live_parameters": ("max_live_parameters", 3),
    "sub_group_size": ("sub_group_size", 3),
}
_OFFLOAD = {
    "offload_optimizer": ("offload_optimizer", 1),
    "offload_param": ("offload_parameters", 3),
}
_TUNING = {"reduce_scatter", "allgather_partitions", "stage3_max_reuse_distance",
           "stage3_gather_16bit_weights_on_model_save", "use_multi_rank_bucket_allreduce",
           "memory_efficient_linear", "ignore_unused_parameters"}  # fmt: skip
# What is logged, and what unipar sees to.
_DROPPED = {"steps_per_print", "wall_clock_breakdown", "dump_state", "memory_breakdown",
            "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "optimizer",
            "scheduler", "dataloader_drop_last", "checkpoint", "comms_logger"}  # fmt: skip
_MONITORS = {"tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler", "autotuning"}
_OFF = {"prescale_gradients", "sparse_gradients", "disable_allgather"}
_PRECISIONS = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
_DTYPES = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16"}


def translate(plan: Plan, call: cst.Call, config: Config) -> dict[str, str]:
    """Put a configuration into ``unipar.yaml``.

    Args:
        plan: the program.
        call: of ``deepspeed.initialize``, for the notes.
        config: what it is given.

    Returns:
        Further arguments of the call that takes its place, by name, as text.
    """
    values = config.values
    plan.config["strategy"] = _strategy(
        plan, call, settled(plan, config.section("zero_optimization"))
    )
    _precision(plan, call, config)
    known = {*_BATCH, *_DROPPED, *_PRECISIONS, "gradient_clipping", "zero_optimization",
             "torch_autocast"}  # fmt: skip
    for key, value in values.items():
        if key in known or (key in _OFF and value is False):
            continue
        if key in _MONITORS:
            if not isinstance(value, Mapping) or value.get("enabled") is not False:
                plan.tell(call, f"DeepSpeed's {key} is not kept.", "Log in the script itself.")
        elif not (isinstance(value, Mapping) and value.get("enabled") is False):
            plan.refuse(
                call, f"unipar.yaml cannot say DeepSpeed's `{key}`.",
                "Leave it out, or port this by hand (docs/how-to/own-loop.md).",
            )  # fmt: skip
    arguments = {name: _text(plan, values[key]) for key, name in _BATCH.items() if key in values}
    for key in _BATCH:
        if values.get(key) == "auto":
            plan.refuse(call, f"{key} is auto, which nobody fills in.", "Write a number.")
    if values.get("dataloader_drop_last") is True:
        arguments["drop_last"] = "True"
    clip = values.get("gradient_clipping", 1.0)
    if "gradient_clipping" not in values:
        plan.warn(
            call,
            "no gradient_clipping is set, and DeepSpeed 0.19 then clips gradients to a norm of 1, "
            "which earlier versions do not.",
            "Kept; leave max_grad_norm out for none.",
        )
    if clip:
        arguments["max_grad_norm"] = _text(plan, clip)
    return arguments


def _strategy(plan: Plan, call: cst.Call, zero: Mapping[str, Any]) -> dict[str, Any]:
    stage = zero.get("stage", 0)
    if not isinstance(stage, int) or isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        plan.refuse(
            call, "the stage of ZeRO is decided while it runs.",
            "Write a number; stage below strategy in unipar.yaml decides then.",
        )  # fmt: skip
        stage = 0
    options: dict[str, Any] = {"name": "deepspeed", "stage": stage}
    native: dict[str, Any] = {}
    for key, value in zero.items():
        if key in _ZERO:
            name, first = _ZERO[key]
            if isinstance(value, float) and value == int(value):
                value = int(value)
            if stage < first or (stage == 3 and key in ("allgather_bucket_size",
                                                        "round_robin_gradients")):  # fmt: skip
                continue
            if isinstance(value, (bool, int)):
                options[name] = value
            else:
                _refuse_zero(plan, call, key)
        elif key in _OFFLOAD and isinstance(value, Mapping):
            _offload(plan, call, options, stage, key, value)
        elif key == "cpu_offload" and isinstance(value, bool):
            options |= {"offload_optimizer": True} if value and stage > 0 else {}
        elif key in _TUNING and isinstance(value, (bool, int, float)):
            native[key] = value
        elif key not in ("stage", *_OFFLOAD) or (value is not None and key != "stage"):
            _refuse_zero(plan, call, key)
    if native and stage > 0:
        options["native"] = {"zero_optimization": native}
    return options


def _offload(
    plan: Plan, call: cst.Call, options: dict[str, Any], stage: int, key: str,
    value: Mapping[str, Any],
) -> None:  # fmt: skip
    name, first = _OFFLOAD[key]
    device = value.get("device", "none")
    if device == "none" or stage < first:
        return
    if device not in ("cpu", "nvme"):
        _refuse_zero(plan, call, key)
    options[name] = True
    if value.get("pin_memory") is True:
        options["pin_memory"] = True
    if device == "nvme":
        options["nvme_path"] = value.get("nvme_path")
    rest = value.keys() - {"device", "pin_memory", "nvme_path", "buffer_count", "fast_init"}
    if rest:
        _refuse_zero(plan, call, f"{key}.{min(rest)}")


def _refuse_zero(plan: Plan, call: cst.Call, key: str) -> None:
    plan.refuse(
        call, f"unipar.yaml cannot say `zero_optimization.{key}`.",
        "Leave it out, or give it a literal value.",
    )  # fmt: skip


def _precision(plan: Plan, call: cst.Call, config: Config) -> None:
    for key, precision in _PRECISIONS.items():
        enabled = settled(plan, config.section(key)).get("enabled", False)
        if enabled not in (True, False) or isinstance(config.values.get(key), cst.BaseExpression):
            plan.refuse(
                call, f"whether it computes in {precision} is decided while it runs.",
                f"Write true or false below {key}; unipar.yaml's precision decides then.",
            )  # fmt: skip
        elif enabled:
            plan.set(call, "precision", precision)
            plan.warn(
                call,
                f"DeepSpeed kept weights and all of the computation in {precision}; now weights "
                f"are fp32, and autocast computes in {precision}. Losses differ by 1e-3, as "
                "normalization and losses are more precise.",
                "precision: fp32 in unipar.yaml is without rounding.",
            )
    cast = config.section("torch_autocast")
    if cast.get("enabled") is True:
        dtype = _DTYPES.get(str(cast.get("dtype", "bfloat16")).removeprefix("torch."))
        if dtype is None:
            plan.refuse(call, "torch_autocast's dtype cannot be seen.", "Write bfloat16.")
        else:
            plan.set(call, "precision", dtype)
    elif cast.get("enabled"):
        plan.refuse(call, "whether it autocasts is decided while it runs.", "Write true or false.")


def _text(plan: Plan, value: Any) -> str:
    """A setting as Python."""
    if isinstance(value, cst.BaseExpression):
        return plan.flow.source(value).code(value)
    return repr(tuple(value) if isinstance(value, list) else value)


def optimizer_text(plan: Plan, call: cst.Call, config: Config, parameters: str) -> str | None:
    """The optimizer that a configuration names, as an expression; refused if it is no torch one.

    Args:
        plan: the program.
        call: for the notes.
        config: with a section ``optimizer``.
        parameters: the expression for what it updates.
    """
    section = config.section("optimizer")
    params, kind = dict(config.section("optimizer").get("params") or {}), section.get("type")
    if not isinstance(kind, str):
        plan.refuse(call, "it cannot be seen which optimizer it is.", "Write its type.")
        return None
    name = kind
    if kind.lower() in ("adam", "adamw"):
        decoupled = params.pop("adam_w_mode", True) is not False or kind.lower() == "adamw"
        name = "AdamW" if decoupled else "Adam"
        torch_adam = params.pop("torch_adam", False) is True
        params.pop("fp32_optimizer_states", None)
        if params.pop("bias_correction", True) is not True:
            plan.refuse(call, "Adam without bias correction is no torch one.", "Leave it out.")
        if not torch_adam and decoupled:
            params.setdefault("weight_decay", 0.0)
    import torch

    if not isinstance(getattr(torch.optim, name, None), type) or "auto" in params.values():
        plan.refuse(
            call, f"the optimizer {kind} is DeepSpeed's own, or some of it is \"auto\".",
            "Use one of torch.optim, with numbers.",
        )  # fmt: skip
        return None
    given = "".join(f", {key}={_text(plan, value)}" for key, value in params.items())
    return f"torch.optim.{name}({parameters}{given})"


def scheduler_text(plan: Plan, call: cst.Call, config: Config) -> str | None:
    """The scheduler that a configuration names, as a function of the optimizer."""
    section = config.section("scheduler")
    names = {"warmup_min_lr": "min_lr", "warmup_max_lr": "max_lr", "warmup_num_steps": "num_steps",
             "warmup_type": "kind", "total_num_steps": "total_steps"}  # fmt: skip
    params = section.get("params") or {}
    kind = section.get("type")
    wrong = [key for key, value in params.items() if key not in names or value == "auto"]
    if kind not in ("WarmupLR", "WarmupDecayLR") or wrong:
        what = f"its {wrong[0]}" if wrong else f"the scheduler {kind}"
        plan.refuse(
            call, f"{what} is DeepSpeed's own.",
            "Use WarmupLR or WarmupDecayLR with numbers, or build one of torch and hand it in as "
            "lr_scheduler=.",
        )  # fmt: skip
        return None
    if kind == "WarmupDecayLR":
        params = {"warmup_max_lr": 0.001, **params}
    given = "".join(f", {names[key]}={_text(plan, value)}" for key, value in params.items())
    return f"lambda optimizer: stepped.Warmup(optimizer{given})"
