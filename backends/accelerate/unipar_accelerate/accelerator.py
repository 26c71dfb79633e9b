"""The Accelerator of one engine, made from what unipar was asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unipar.engine import COMPUTE_DTYPES, SeenAsModule, modules_of_classes, repeated_blocks
from unipar.errors import ConfigError
from unipar.state import is_dtensor
from unipar.strategy import EngineSpec
from unipar.world import World
from unipar_accelerate.framework import Framework, native_precision, quiet
from unipar_accelerate.options import ACCELERATOR_KEYS, AccelerateOptions

if TYPE_CHECKING:
    from accelerate import Accelerator


def make_accelerator(
    framework: Framework,
    options: AccelerateOptions,
    spec: EngineSpec,
    module: nn.Module,
    world: World,
) -> Accelerator:
    """An Accelerator whose settings are the run's.

    Raises:
        ConfigError: another one of this process has another precision, which all share.
    """
    from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin

    precision = native_precision(spec.precision)
    shared = framework.precision()
    if shared not in (None, precision):
        raise ConfigError(
            f"accelerate: engine '{spec.name}' is to run in {spec.precision}, and an Accelerator "
            f"of this process was made with mixed_precision='{shared}'. All share one precision: "
            "give all engines the same."
        )
    plugin: dict[str, Any] = (
        {"kwargs_handlers": [_ddp(options)]}
        if options.plugin == "ddp"
        else {"fsdp_plugin": _fsdp(options, spec, module)}
    )
    native = {key: value for key, value in options.native.items() if key in ACCELERATOR_KEYS}
    with quiet():
        accelerator = framework.accelerate.Accelerator(
            cpu=world.device.type == "cpu",
            mixed_precision=precision,
            # Micro-batches are unipar's, which has divided the loss already.
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            # A scheduler that the user prepares steps once, not once for each process.
            dataloader_config=DataLoaderConfiguration(split_batches=True),
            **plugin,
            **native,
        )
    if precision == "fp16" and accelerator.scaler is None:
        # Accelerate 1.15.0 leaves fp16 out on the CPU without a word (accelerator.py, "Mixed
        # precision attributes"), and trains in fp32.
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler(world.device.type)
    return accelerator


def check_wrapped(
    accelerator: Accelerator, options: AccelerateOptions, model: nn.Module, world: World
) -> None:
    """Refuse to train a model that Accelerate has not wrapped as it was asked to.

    Raises:
        ConfigError: ranks would train unsynchronized, or whole where they should be sharded.
    """
    if options.plugin == "fsdp":
        done = accelerator.is_fsdp2 and all(is_dtensor(p) for p in model.parameters())
    else:
        done = world.size == 1 or isinstance(model, DistributedDataParallel)
    if not done:
        raise ConfigError(
            f"accelerate: plugin='{options.plugin}' was asked for, and Accelerate has made a "
            f"{type(model).__name__} of the model under {accelerator.distributed_type} with "
            f"{accelerator.num_processes} process(es). Look at what the environment sets "
            "(ACCELERATE_*, FSDP_*), or use strategy='ddp' or 'fsdp'."
        )


def of_views(unwrap: Callable[..., Any]) -> Callable[..., Any]:
    """``unwrap_model`` that takes ``engine.model``, too, which is a view of the user's module."""

    @functools.wraps(unwrap)
    def unwrapped(model: Any, *args: Any, **kwargs: Any) -> Any:
        return unwrap(model.module if isinstance(model, SeenAsModule) else model, *args, **kwargs)

    return unwrapped


def _ddp(options: AccelerateOptions) -> Any:
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    hooks = {"none": "NO", "fp16": "FP16", "bf16": "BF16", "power_sgd": "POWER_SGD"}
    native = {key: value for key, value in options.native.items() if key not in ACCELERATOR_KEYS}
    return DistributedDataParallelKwargs(
        bucket_cap_mb=options.bucket_cap_mb,
        find_unused_parameters=options.find_unused_parameters,
        static_graph=options.static_graph,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        broadcast_buffers=options.broadcast_buffers,
        comm_hook=DDPCommunicationHookType[hooks[options.compression]],
        **native,
    )


def _fsdp(options: AccelerateOptions, spec: EngineSpec, module: nn.Module) -> Any:
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy

    units = _units(options, module)
    dtype = COMPUTE_DTYPES[spec.precision]
    policy = MixedPrecisionPolicy()
    if dtype is not torch.float32:
        # Accelerate's own policy would reduce gradients in half precision too.
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    with quiet():
        return FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=options.reshard_after_forward,
            cpu_offload=options.cpu_offload,
            auto_wrap_policy="transformer_based_wrap" if units else "no_wrap",
            transformer_cls_names_to_wrap=units or None,
            mixed_precision_policy=policy,
            activation_checkpointing=False,
            cpu_ram_efficient_loading=False,
            state_dict_type="SHARDED_STATE_DICT",
        )


def _units(options: AccelerateOptions, module: nn.Module) -> list[str]:
    """Class names of what is gathered as a unit."""
    if options.wrap == "none":
        return []
    if options.wrap == "auto":
        return sorted({type(block).__name__ for block in repeated_blocks(module)})
    assert not isinstance(options.wrap, str)
    modules_of_classes(module, options.wrap, "accelerate: wrap")
    return list(options.wrap)
