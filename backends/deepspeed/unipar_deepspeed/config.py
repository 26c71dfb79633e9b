"""DeepSpeed's configuration, made from a run's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from unipar.errors import ConfigError
from unipar.strategy import EngineSpec
from unipar_deepspeed.axes import NATIVE
from unipar_deepspeed.options import AnyOptions
from unipar_deepspeed.swapped import Files

_OWNED_BY = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "micro_batch_size",
    "gradient_clipping": "max_grad_norm",
    "gradient_allreduce_op": "the training step, which sums",
    "prescale_gradients": "the training step, which sums",
    "gradient_predivide_factor": "the training step, which sums",
    "fp16": "precision",
    "bf16": "precision",
    "torch_autocast": "precision",
    "amp": "precision",
    "optimizer": "optimizer",
    "scheduler": "lr_scheduler",
    "managed_gradient_accumulation": "the training step, which unipar ends itself",
    "zero_allow_untested_optimizer": "optimizer",
    "zero_force_ds_cpu_optimizer": "optimizer",
    "steps_per_print": "log_every",
    "data_types": "precision",
    "zero_optimization.stage": "the strategy's stage",
    "zero_optimization.overlap_comm": "overlap_comm",
    "zero_optimization.reduce_bucket_size": "reduce_bucket_size",
    "zero_optimization.allgather_bucket_size": "allgather_bucket_size",
    "zero_optimization.contiguous_gradients": "contiguous_gradients",
    "zero_optimization.round_robin_gradients": "round_robin_gradients",
    "zero_optimization.offload_optimizer": "offload_optimizer",
    "zero_optimization.offload_param": "offload_parameters",
    "zero_optimization.stage3_prefetch_bucket_size": "prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold": "persistence_threshold",
    "zero_optimization.stage3_max_live_parameters": "max_live_parameters",
    "zero_optimization.sub_group_size": "sub_group_size",
}
"""Keys of DeepSpeed's that follow from a field of the run or an option of the strategy."""


def check_native(options: AnyOptions) -> None:
    """Refuse what is set in two places.

    Raises:
        ConfigError: ``native`` has a key that unipar owns.
    """
    for key in _keys(options.native):
        if key in NATIVE:
            raise ConfigError(
                f"{options.strategy}: native sets DeepSpeed's '{key}', which arranges ranks and "
                f"follows from {NATIVE[key]}. Leave it out of native."
            )
        if key in _OWNED_BY:
            raise ConfigError(
                f"{options.strategy}: native sets DeepSpeed's '{key}', which unipar makes from "
                f"{_OWNED_BY[key]}. Set it there, and leave it out of native."
            )


def deepspeed_config(
    options: AnyOptions,
    spec: EngineSpec,
    world_size: int,
    num_parameters: int,
    files: Files | None = None,
) -> dict[str, Any]:
    """Return the configuration that ``deepspeed.initialize`` is given.

    Batch sizes are those that unipar hands out. DeepSpeed only multiplies them, for its own log:
    when a step ends, and what gradients are divided by, is said at each step.

    Args:
        options: of the strategy.
        spec: what the user asked of the engine.
        world_size: number of ranks.
        num_parameters: of the model, so that no bucket is larger than it.
        files: where what is offloaded goes, if not into host memory.
    """
    micro = spec.micro_batch_size or 1
    clip = spec.max_grad_norm
    config: dict[str, Any] = {
        "train_batch_size": micro * world_size,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        # Its default is 1.0.
        "gradient_clipping": 0.0 if clip is None or clip == float("inf") else clip,
        # Stage 3 can only average.
        "gradient_allreduce_op": "mean" if options.stage == 3 else "sum",
        "steps_per_print": None,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": _zero(options, num_parameters, files),
    }
    return _merged(config, options.native)


def _zero(options: AnyOptions, num_parameters: int, files: Files | None) -> dict[str, Any]:
    stage = options.stage
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": min(options.reduce_bucket_size, num_parameters),
        "overlap_comm": options.overlap_comm,
        "contiguous_gradients": options.contiguous_gradients,
    }
    if stage in (1, 2):
        zero["allgather_bucket_size"] = options.allgather_bucket_size
        zero["round_robin_gradients"] = options.round_robin_gradients
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": min(options.prefetch_bucket_size, num_parameters),
            "stage3_param_persistence_threshold": options.persistence_threshold,
            "stage3_max_live_parameters": options.max_live_parameters,
            "sub_group_size": options.sub_group_size,
        }
    on_host = {"device": "cpu", "pin_memory": options.pin_memory}
    in_files = {"device": "nvme", "nvme_path": str(files.directory)} if files else {}
    if options.offload_optimizer:
        # One buffer for each state of a parameter: with AMSGrad, five.
        zero["offload_optimizer"] = {**in_files, "buffer_count": 5} if files else on_host
    if options.offload_parameters:
        buffers = (
            {"buffer_size": files.buffer_size, "buffer_count": files.buffer_count} if files else {}
        )
        zero["offload_param"] = {**in_files, **buffers, "max_in_cpu": 0} if files else on_host
    return zero


def _merged(config: Mapping[str, Any], native: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(config)
    for key, value in native.items():
        own = merged.get(key)
        nested = isinstance(own, Mapping) and isinstance(value, Mapping)
        merged[key] = _merged(own, value) if nested else value  # pyright: ignore[reportArgumentType]
    return merged


def _keys(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{key}.")
