"""The files that ``accelerate config`` writes."""

from __future__ import annotations

from typing import Any

import libcst as cst

from unipar.migrate.literals import argument, constant
from unipar.migrate.plan import Plan
from unipar.migrate.tracing import trace

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

    What the script passes itself wins over the file, as it does there, so that is left out.

    Args:
        plan: the program.
        call: builds the ``Accelerator``.
    """
    files = {
        name: found for name, text in sorted(plan.settings.items())
        if name.endswith((".yaml", ".yml")) and (found := _parsed(text)) is not None
    }  # fmt: skip
    if len(files) > 1:
        plan.tell(
            call, f"there are several files of accelerate config, {', '.join(files)}, of which "
            "none is in unipar.yaml.",
            "Start the script by accelerate launch --config_file FILE as before, or leave only "
            "one there and migrate again.",
        )  # fmt: skip
        return
    for name, found in files.items():
        _read_file(plan, call, name, found)
        plan.launched |= _variables(found)


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
    own: list[str] = []
    if precision not in _PRECISIONS:
        words = ", ".join(_PRECISIONS)
        plan.refuse(call, f"{name} asks for precision {precision}.", f"Use one of {words}.")
    elif _decides(plan, call, 2, "mixed_precision"):
        own += [] if _is_said(plan, call, 2, "mixed_precision") else [f"precision {precision}"]
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
    if plugin != "ddp" and any(_decides(plan, call, *one) for one in _PLUGINS[plugin]):
        own.append(f"options of {plugin}")
    elif plugin == "deepspeed":
        stage = options.pop("stage", 2)
        known = {"name": f"zero{stage}"} if stage else {"name": plugin, "stage": 0}
        plan.config["strategy"] = {**known, **options} if options or not stage else known["name"]
    elif plugin == "fsdp":
        reshards = options.pop("reshard_after_forward", True)
        options |= {} if reshards else {"sharding": "grad_op"}
        plan.config["strategy"] = {"name": "fsdp", **options} if options else "fsdp"
    if own:
        plan.tell(
            call, f"{name} asks for {' and '.join(own)}, which counts only where what is passed "
            "here is None, so it is not in unipar.yaml.",
            "Start the script by accelerate launch as before, or pass what is meant.",
        )  # fmt: skip
        return
    plan.tell(
        call,
        f"{name} is in unipar.yaml now: accelerate launch, and this file, are no longer needed.",
        "Start the script with torchrun, srun or mpirun.",
    )


_PLUGINS = {"deepspeed": ((6, "deepspeed_plugin"), (19, "deepspeed_plugins")),
            "fsdp": ((7, "fsdp_plugin"),)}  # fmt: skip
"""Arguments of ``Accelerator``, by position and name."""


def _decides(plan: Plan, call: cst.Call, index: int, name: str) -> bool:
    """Whether a call may pass an argument that is not ``None``."""
    if any(one.star for one in call.args):
        return True
    given = argument(call, index, name)
    return given is not None and any(
        not (isinstance(one, cst.Name) and one.value == "None") for one in trace(plan, given)
    )


def _is_said(plan: Plan, call: cst.Call, index: int, name: str) -> bool:
    """Whether all that it may pass stands in the text, so that the file says nothing."""
    given = argument(call, index, name)
    return given is not None and all(constant(one) is not None for one in trace(plan, given))


def _variables(found: dict[str, Any]) -> dict[str, str]:
    """What ``accelerate launch`` sets for the script (Accelerate 1.15.0, utils/launch.py)."""
    variables = {
        "ACCELERATE_MIXED_PRECISION": str(found.get("mixed_precision") or "no"),
        "ACCELERATE_USE_CPU": str(bool(found.get("use_cpu"))),
    }
    plugin = str(found.get("distributed_type"))
    if plugin in _PREFIXES:
        variables[f"ACCELERATE_USE_{plugin}"] = "true"
        for key, value in (found.get(f"{plugin.lower()}_config") or {}).items():
            key = _LAUNCHED.get(key, key.removeprefix("fsdp_").upper())
            variables[f"{_PREFIXES[plugin]}{key}"] = str(value)
    return variables


_PREFIXES = {"DEEPSPEED": "ACCELERATE_DEEPSPEED_", "FSDP": "FSDP_"}
_LAUNCHED = {"zero3_init_flag": "ZERO3_INIT", "deepspeed_config_file": "CONFIG_FILE",
             "fsdp_transformer_layer_cls_to_wrap": "TRANSFORMER_CLS_TO_WRAP"}  # fmt: skip
"""Keys of a plugin's settings whose variable has another name."""
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
