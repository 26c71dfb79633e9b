"""DeepSpeed's configuration as settings of a run: what is there is read when the run begins."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unipar.compat.deepspeed_names import CONFIG, FP16, NATIVE, ZERO
from unipar.compat.runconfig import asked_scale
from unipar.errors import ConfigError

log = logging.getLogger("unipar")

_OPTIONS = {
    "overlap_comm": ("overlap_comm", (1, 2, 3)),
    "reduce_bucket_size": ("reduce_bucket_size", (0, 1, 2, 3)),
    "allgather_bucket_size": ("allgather_bucket_size", (0, 1, 2)),
    "contiguous_gradients": ("contiguous_gradients", (1, 2, 3)),
    "round_robin_gradients": ("round_robin_gradients", (1, 2)),
    "stage3_prefetch_bucket_size": ("prefetch_bucket_size", (3,)),
    "stage3_param_persistence_threshold": ("persistence_threshold", (3,)),
    "stage3_max_live_parameters": ("max_live_parameters", (3,)),
    "sub_group_size": ("sub_group_size", (3,)),
}
"""Options of the strategies, and the stages in which DeepSpeed looks at them."""
_OFFLOAD = {
    "offload_optimizer": ("offload_optimizer", (1, 2, 3)),
    "offload_param": ("offload_parameters", (3,)),
}
DEFAULT_CLIPPING = 1.0
"""What DeepSpeed 0.19 clips gradients to where ``gradient_clipping`` is not set."""
_PRECISIONS = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
_DTYPES = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "half": "fp16"}


def read_config(given: Any, *, builds: bool = False) -> dict[str, Any]:
    """What a configuration asks for.

    Args:
        given: a mapping, the path of a JSON file, or an object with ``config``. Values that are
            ``"auto"`` are left to unipar.
        builds: whether the caller builds the optimizer and the scheduler that it names.

    Returns:
        ``strategy``; ``max_grad_norm``, unless it is 0; ``precision`` and ``accumulation`` where it
        says so; and ``loss_scale``, unless it is not DeepSpeed's own fp16 that it asks for.

    Raises:
        ConfigError: it cannot be read, or asks for what cannot be had.
    """
    config = _without_auto(load_config(given))
    zero = config.pop("zero_optimization", {})
    clip = float(config.pop("gradient_clipping", DEFAULT_CLIPPING))
    found: dict[str, Any] = {"max_grad_norm": clip} if clip else {}
    native: dict[str, Any] = {}
    for key, value in config.items():
        if key in (*_PRECISIONS, "torch_autocast"):
            _add_precision(found, key, value)
        elif key == "gradient_accumulation_steps":
            found["accumulation"] = int(value)
        elif key in NATIVE:
            native[key] = value
        elif key in ("optimizer", "scheduler") and not builds:
            raise ConfigError(
                f"DeepSpeed's configuration has '{key}'. Build the {key} in the script, and "
                "prepare it."
            )
        else:
            _check(key, value)
    found["strategy"] = _strategy(zero, native)
    if found.get("precision", "fp16") == "fp16" and not is_enabled(config.get("torch_autocast")):
        # Where it says nothing of a precision, what prepares the model may.
        found |= _loss_scale(config.get("fp16", {}))
    return found


def load_config(given: Any) -> dict[str, Any]:
    """The configuration itself, for the caller to keep.

    Raises:
        ConfigError: it cannot be read.
    """
    given = getattr(given, "config", given)
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
    return {key: dict(one) if isinstance(one, Mapping) else one for key, one in given.items()}


def zero_stage(config: Mapping[str, Any]) -> int:
    """The stage of ZeRO that a configuration asks for."""
    zero = config.get("zero_optimization", 0)
    return int(zero.get("stage", 0) if isinstance(zero, Mapping) else bool(zero))


def skips_not_finite(config: Mapping[str, Any]) -> bool:
    """Whether ZeRO leaves out steps whose gradients are not finite.

    DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py and stage3.py, step: in fp32, too.
    """
    halves = (config.get(key) for key in ("bf16", "bfloat16"))
    unchecked = any(isinstance(one, Mapping) and not one.get("check_grad_overflow", True)
                    for one in halves)  # fmt: skip
    return zero_stage(config) == 3 or (zero_stage(config) > 0 and not unchecked)


def find_auto(config: Mapping[str, Any], before: str = "") -> str | None:
    """The first key whose value is ``"auto"``; ``None`` if there is none."""
    for key, value in config.items():
        if value == "auto":
            return f"{before}{key}"
        found = find_auto(value, f"{before}{key}.") if isinstance(value, Mapping) else None
        if found is not None:
            return found
    return None


def _without_auto(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if value != "auto"
    }


def _check(key: str, value: Any) -> None:
    """Refuse a setting that would change training; name one that is nobody's."""
    row = CONFIG.find(key)
    if row is None:
        log.warning("DeepSpeed's configuration has '%s', which DeepSpeed does not read.", key)
    elif row.fate == "refused" and _is_on(key, value):
        raise ConfigError(f"DeepSpeed's configuration has '{key}'. {row.why}")


_HARMLESS = {"gradient_allreduce_op": "mean", "managed_gradient_accumulation": True}


def _is_on(key: str, value: Any) -> bool:
    if isinstance(value, Mapping):
        if "enabled" in value:
            return bool(value["enabled"])
        return any(_is_on(inner, one) for inner, one in value.items())
    if key in _HARMLESS:
        return value != _HARMLESS[key]
    return value is True or value not in (None, False, 0, 1, "none")


def _add_precision(found: dict[str, Any], key: str, value: Any) -> None:
    if not is_enabled(value):
        return
    precision = _PRECISIONS.get(key)
    if precision is None:
        asked = str(value.get("dtype", "bfloat16")).removeprefix("torch.")
        if asked not in _DTYPES:
            raise ConfigError(f"torch_autocast's dtype is {asked!r}. Use bfloat16 or float16.")
        precision = _DTYPES[asked]
    if found.setdefault("precision", precision) != precision:
        raise ConfigError(
            f"DeepSpeed's configuration asks for {found['precision']} and for {precision}. Enable "
            "one of fp16, bf16 and torch_autocast."
        )


def is_enabled(section: Any) -> bool:
    """Whether a section of a configuration is turned on."""
    return bool(section.get("enabled") if isinstance(section, Mapping) else section)


_SCALING = {"hysteresis": (2, 1), "min_loss_scale": (1,), "consecutive_hysteresis": (False,)}
"""What of a loss scale is not kept: DeepSpeed's default, and what is done here."""


def _loss_scale(fp16: Any) -> dict[str, Any]:
    """How DeepSpeed's own fp16 scales losses; nothing where it is turned off.

    Its names and defaults are those of DeepSpeed 0.19 (runtime/precision_config.py).
    """
    section = fp16 if isinstance(fp16, Mapping) else {"enabled": fp16}
    # Left out or "auto", it is for another setting to say.
    if not section.get("enabled", True):
        return {}
    static = section.get("loss_scale", 0)
    if static:
        return asked_scale(initial=static, growth_factor=1, backoff_factor=1)
    for key, kept in _SCALING.items():
        row = FP16.find(key)
        if row is not None and section.get(key, kept[0]) not in kept:
            log.warning("DeepSpeed's fp16 has '%s'. %s", key, row.why)
    return asked_scale(
        # Beyond 1000 it is refused, and still a number.
        initial=2.0 ** min(int(section.get("initial_scale_power", 16)), 1000),
        growth_interval=section.get("loss_scale_window", 1000),
    )


def _strategy(zero: Any, native: dict[str, Any]) -> dict[str, Any]:
    """The strategy of a stage of ZeRO; options of other stages are left out, as there."""
    if not isinstance(zero, Mapping):
        zero = {"stage": int(bool(zero))}
    stage = int(zero.get("stage", 0))
    options: dict[str, Any] = {}
    for key, value in zero.items():
        row = ZERO.find(key)
        if key in _OPTIONS:
            name, stages = _OPTIONS[key]
            # Bucket sizes are written as 5e8.
            number = int(value) if isinstance(value, float) and value == int(value) else value
            options |= {name: number} if stage in stages and value is not None else {}
        elif key in _OFFLOAD or key == "cpu_offload":
            options |= _offloading(key, value, stage)
        elif row is not None and row.fate == "refused":
            if _is_on(key, value):
                raise ConfigError(f"DeepSpeed's zero_optimization has '{key}'. {row.why}")
        elif stage > 0 and (row is None or key in NATIVE):
            # DeepSpeed itself refuses what it does not know.
            native.setdefault("zero_optimization", {})[key] = value
    name = {"name": f"zero{stage}"} if stage else {"name": "deepspeed", "stage": 0}
    return {**name, **options, **({"native": native} if native else {})}


def _offloading(key: str, value: Any, stage: int) -> dict[str, Any]:
    if key == "cpu_offload":
        key, value = "offload_optimizer", {"device": "cpu" if value else "none"}
    name, stages = _OFFLOAD[key]
    device = (value or {}).get("device", "none")
    if device in (None, "none") or stage not in stages:
        return {}
    found: dict[str, Any] = {name: True}
    if device == "nvme":
        found["nvme_path"] = value.get("nvme_path")
    if "pin_memory" in value:
        found["pin_memory"] = value["pin_memory"]
    return found
