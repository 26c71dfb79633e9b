"""DeepSpeed's configuration as settings of a run: what is there is read when the run begins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unipar.errors import ConfigError

_ZERO = {
    "overlap_comm": "overlap_comm",
    "reduce_bucket_size": "reduce_bucket_size",
    "allgather_bucket_size": "allgather_bucket_size",
    "contiguous_gradients": "contiguous_gradients",
    "round_robin_gradients": "round_robin_gradients",
    "stage3_prefetch_bucket_size": "prefetch_bucket_size",
    "stage3_param_persistence_threshold": "persistence_threshold",
    "stage3_max_live_parameters": "max_live_parameters",
    "sub_group_size": "sub_group_size",
}
_OFFLOAD = {"offload_optimizer": "offload_optimizer", "offload_param": "offload_parameters"}
_WITHOUT_EFFECT = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "steps_per_print", "wall_clock_breakdown",
    "dump_state", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    "prescale_gradients", "gradient_predivide_factor",
}  # fmt: skip
_WITHOUT_EFFECT_OF_ZERO = {
    "stage", "allgather_partitions", "reduce_scatter", "stage3_max_reuse_distance",
    "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save",
}  # fmt: skip
_REFUSED = {
    "optimizer": "Build the optimizer in the script, and prepare it.",
    "scheduler": "Build the scheduler in the script, and prepare it.",
    "amp": "Use bf16 or fp16.",
}


def read_config(given: Any) -> dict[str, Any]:
    """What a configuration asks for.

    Args:
        given: a mapping, the path of a JSON file, or an object with ``config``. Values that are
            ``"auto"`` are left to unipar.

    Returns:
        ``strategy``; and ``precision``, ``max_grad_norm`` and ``accumulation`` where it says so.

    Raises:
        ConfigError: it cannot be read, or asks for what cannot be had.
    """
    config = _loaded(getattr(given, "config", given))
    zero = config.pop("zero_optimization", {})
    stage = int(zero.get("stage", 0))
    options: dict[str, Any] = {}
    native: dict[str, Any] = {}
    for key, value in zero.items():
        if key in _ZERO:
            options[_ZERO[key]] = value
        elif key in _OFFLOAD:
            options |= _offloading(key, value)
        elif key not in _WITHOUT_EFFECT_OF_ZERO:
            native.setdefault("zero_optimization", {})[key] = value
    found: dict[str, Any] = {}
    for key, value in config.items():
        if key in ("bf16", "fp16") and value.get("enabled"):
            found["precision"] = key
        elif key == "gradient_clipping":
            found |= {"max_grad_norm": float(value)} if value else {}
        elif key == "gradient_accumulation_steps":
            found["accumulation"] = int(value)
        elif key in _REFUSED:
            raise ConfigError(f"DeepSpeed's configuration has '{key}'. {_REFUSED[key]}")
        elif key not in (*_WITHOUT_EFFECT, "bf16", "fp16", "bfloat16"):
            native[key] = value
    name = {"name": f"zero{stage}"} if stage else {"name": "deepspeed", "stage": 0}
    found["strategy"] = {**name, **options, **({"native": native} if native else {})}
    return found


def _loaded(given: Any) -> dict[str, Any]:
    if isinstance(given, (str, Path)):
        try:
            given = json.loads(Path(given).read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"DeepSpeed's configuration {given} cannot be read: {error}. Give the path of a "
                "JSON file, or a dict."
            ) from error
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"DeepSpeed's configuration is a {type(given).__name__}. Give a dict, or the path of "
            "a JSON file."
        )
    return _without_auto(given)


def _without_auto(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if value != "auto"
    }


def _offloading(key: str, value: Mapping[str, Any] | None) -> dict[str, Any]:
    device = (value or {}).get("device", "none")
    if value is None or device in (None, "none"):
        return {}
    found: dict[str, Any] = {_OFFLOAD[key]: True}
    if device == "nvme":
        found["nvme_path"] = value.get("nvme_path")
    if "pin_memory" in value:
        found["pin_memory"] = value["pin_memory"]
    return found
