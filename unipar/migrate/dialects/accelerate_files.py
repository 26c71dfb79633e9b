"""The files that ``accelerate config`` writes."""

from __future__ import annotations

from typing import Any

import libcst as cst

from unipar.migrate.plan import Plan

ACCELERATOR = ("accelerate.Accelerator", "accelerate.accelerator.Accelerator")
_PRECISIONS = {"no": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}

_MACHINE = ("compute_environment", "distributed_type", "main_process_ip", "main_process_port",
            "main_training_function", "machine_rank", "num_machines", "num_processes", "gpu_ids",
            "same_network", "rdzv_backend", "debug", "enable_cpu_affinity", "tpu_env", "tpu_name",
            "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "downcast_bf16", "use_cpu",
            "mixed_precision", "ipex_config", "mpirun_config")  # fmt: skip
_DISTRIBUTED = {"NO": "ddp", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp", "DEEPSPEED": "deepspeed",
                "FSDP": "fsdp"}  # fmt: skip


def read_files(plan: Plan, call: cst.Call) -> None:
    """Turn the file of ``accelerate config`` beside the script into ``plan.config``.

    Args:
        plan: the program.
        call: builds the ``Accelerator``.
    """
    for name, text in sorted(plan.settings.items()):
        found = _parsed(text) if name.endswith((".yaml", ".yml")) else None
        if found is not None:
            _read_file(plan, call, name, found)


def _parsed(text: str) -> dict[str, Any] | None:
    """The content, if this is such a file."""
    import yaml

    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        return None
    return found if isinstance(found, dict) and "compute_environment" in found else None


def _read_file(plan: Plan, call: cst.Call, name: str, found: dict[str, Any]) -> None:
    plugin = _DISTRIBUTED.get(str(found.get("distributed_type", "NO")))
    if plugin is None:
        plan.refuse(
            call, f"{name} asks for distributed_type {found['distributed_type']}.",
            f"Use one of {', '.join(_DISTRIBUTED)}, or leave the file out.",
        )  # fmt: skip
        return
    precision = str(found.get("mixed_precision", "no"))
    if precision not in _PRECISIONS:
        words = ", ".join(_PRECISIONS)
        plan.refuse(call, f"{name} asks for precision {precision}.", f"Use one of {words}.")
    elif precision != "no":
        plan.config["precision"] = _PRECISIONS[precision]
    if found.get("use_cpu"):
        plan.set(call, "device", "cpu")
    options: dict[str, Any] = {}
    for key, value in found.items():
        if key == "deepspeed_config" and plugin == "deepspeed":
            options |= _translated(plan, call, name, value or {}, _DEEPSPEED)
        elif key == "fsdp_config" and plugin == "fsdp":
            options |= _translated(plan, call, name, value or {}, _FSDP)
        elif key not in (*_MACHINE, "deepspeed_config", "fsdp_config") and value not in _NOTHING:
            plan.refuse(
                call, f"{name} sets {key}: {value}, which unipar.yaml cannot say.",
                "Leave it out of the file.",
            )  # fmt: skip
    if plugin == "deepspeed":
        stage = options.pop("stage", 2)
        known = {"name": f"zero{stage}"} if stage else {"name": plugin, "stage": 0}
        plan.config["strategy"] = {**known, **options} if options or not stage else known["name"]
    elif plugin == "fsdp":
        reshards = options.pop("reshard_after_forward", True)
        options |= {} if reshards else {"sharding": "grad_op"}
        plan.config["strategy"] = {"name": "fsdp", **options} if options else "fsdp"
    plan.tell(
        call,
        f"{name} is in unipar.yaml now: accelerate launch, and this file, are no longer needed.",
        "Start the script with torchrun, srun or mpirun.",
    )


_NOTHING: tuple[Any, ...] = (None, False, {}, [], "")
# Keys of a plugin's settings: the option, or None where it says nothing beyond the default.
_DEEPSPEED = {"zero_stage": "stage", "zero3_init_flag": None, "zero3_save_16bit_model": None,
              "deepspeed_multinode_launcher": None}  # fmt: skip
_FSDP = {"fsdp_reshard_after_forward": "reshard_after_forward",
         "fsdp_offload_params": "cpu_offload", "fsdp_version": None,
         "fsdp_state_dict_type": None, "fsdp_cpu_ram_efficient_loading": None,
         "fsdp_sync_module_states": None, "fsdp_use_orig_params": None,
         "fsdp_backward_prefetch": None, "fsdp_forward_prefetch": None,
         "fsdp_auto_wrap_policy": None}  # fmt: skip


def _translated(
    plan: Plan, call: cst.Call, name: str, given: dict[str, Any], known: dict[str, str | None]
) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for key, value in given.items():
        option = known.get(key)
        if option is not None and isinstance(value, (bool, int)):
            options[option] = value
        elif key == "fsdp_transformer_layer_cls_to_wrap" and known is _FSDP:
            options["wrap"] = [one.strip() for one in str(value).split(",")]
        elif key == "gradient_clipping" or key == "gradient_accumulation_steps":
            plan.refuse(
                call, f"{name} sets {key}, which belongs into the script.",
                "Use clip_grad_norm_ and Accelerator(gradient_accumulation_steps=...) there.",
            )  # fmt: skip
        elif key not in known and value not in (*_NOTHING, "none"):
            plan.refuse(
                call, f"{name} sets {key}: {value}, which unipar.yaml cannot say.",
                "Leave it out of the file.",
            )  # fmt: skip
    return options
