"""Functions and settings that scripts take from ``accelerate.utils``."""

from __future__ import annotations

import functools
import gc
import importlib.util
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from unipar.compat.accelerate import files, operations
from unipar.compat.accelerate.data_loader import share_generators
from unipar.compat.accelerate.plugins import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    DynamoBackend,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    LoggerType,
    PrecisionType,
    ProfileKwargs,
    ProjectConfiguration,
    RNGType,
    TorchDynamoPlugin,
)
from unipar.compat.accelerate.processes import DistributedType
from unipar.compat.accelerate.streams import joined as concatenate
from unipar.compat.accelerate.streams import length_of as find_batch_size
from unipar.compat.accelerate_names import UTILS
from unipar.compat.fp32_outputs import fp32 as convert_to_fp32
from unipar.compat.models import PreparedModel
from unipar.compat.run import current
from unipar.data import move_to
from unipar.errors import ConfigError

__all__ = [
    "MODEL_NAME", "OPTIMIZER_NAME", "RNG_STATE_NAME", "SAFE_MODEL_NAME", "SAFE_WEIGHTS_INDEX_NAME",
    "SAFE_WEIGHTS_NAME", "SAMPLER_NAME", "SCALER_NAME", "SCHEDULER_NAME", "WEIGHTS_INDEX_NAME",
    "WEIGHTS_NAME", "AutocastKwargs", "DDPCommunicationHookType", "DataLoaderConfiguration",
    "DeepSpeedPlugin", "DistributedDataParallelKwargs", "DistributedType", "DynamoBackend",
    "FullyShardedDataParallelPlugin", "GradScalerKwargs", "GradientAccumulationPlugin",
    "InitProcessGroupKwargs", "KwargsHandler", "LoggerType", "PrecisionType", "ProfileKwargs",
    "ProjectConfiguration", "RNGType", "TorchDynamoPlugin", "broadcast", "broadcast_object_list",
    "concatenate", "convert_outputs_to_fp32", "convert_to_fp32",
    "extract_model_from_parallel", "find_batch_size", "find_executable_batch_size", "gather",
    "gather_object", "honor_type", "is_compiled_module", "is_torch_tensor",
    "listify", "load", "pad_across_processes", "recursively_apply", "reduce", "release_memory",
    "save", "send_to_device", "set_seed", "slice_tensors", "synchronize_rng_state",
    "synchronize_rng_states", "tqdm", "wait_for_everyone", "write_basic_config",
]  # fmt: skip

MODEL_NAME, SAFE_MODEL_NAME = "pytorch_model", "model"
OPTIMIZER_NAME, SCALER_NAME = "optimizer", "scaler.pt"
RNG_STATE_NAME, SAMPLER_NAME, SCHEDULER_NAME = "random_states", "sampler", "scheduler"
WEIGHTS_NAME, SAFE_WEIGHTS_NAME = "pytorch_model.bin", "model.safetensors"
WEIGHTS_INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
SAFE_WEIGHTS_INDEX_NAME = f"{SAFE_WEIGHTS_NAME}.index.json"

_PACKAGES = {
    "bnb": "bitsandbytes", "pynvml": "pynvml", "weights_only": "torch", "tensorboard": "tensorboard"
}  # fmt: skip
_DEVICES = ("cuda", "mps", "xpu", "npu", "mlu", "musa", "hpu", "sdaa", "neuron")

# -- random numbers and memory -------------------------------------------------------------------


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed the generators of Python, NumPy and torch; of each rank otherwise, if so asked."""
    seed += current.placement().rank if device_specific else 0
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_state(rng_type: Any = None, generator: torch.Generator | None = None) -> None:
    """Give every rank the state of a generator of rank 0. Collective."""
    share_generators([str(rng_type)], generator, current.world())


def synchronize_rng_states(
    rng_types: Sequence[Any], generator: torch.Generator | None = None
) -> None:
    """Give every rank the states of rank 0's generators. Collective."""
    share_generators([str(one) for one in rng_types], generator, current.world())


def release_memory(*objects: Any) -> list[None]:
    """Collect garbage, and free what a GPU caches.

    Returns:
        ``None`` for each object, to put in its place.
    """
    _free()
    return [None] * len(objects)


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Call a function with a batch size, and with a smaller one while memory runs out.

    The size that fits is the first that a later call tries. On several ranks they have to run out
    alike: one that alone does ends the run.

    Args:
        function: takes the batch size first.
        starting_batch_size: the first that is tried.
        reduce_batch_size_fn: gives the next one; left out: nine tenths of it.

    Raises:
        RuntimeError: the next size is 0.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size, starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )  # fmt: skip
    size = starting_batch_size

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal size
        if len(inspect.signature(function).parameters) < len(args) + 1:
            raise TypeError(
                f"{function.__name__} is given its batch size by find_executable_batch_size. Call "
                "it without one."
            )
        while size != 0:
            _free()
            try:
                return function(size, *args, **kwargs)
            except Exception as error:
                if not _ran_out(error):
                    raise
            size = reduce_batch_size_fn() if reduce_batch_size_fn else int(size * 0.9)
        raise RuntimeError("no batch size fits into memory: it has come down to 0")

    return call


def _ran_out(error: Exception) -> bool:
    said = str(error)
    known = ("out of memory", "CUDNN_STATUS_NOT_SUPPORTED", "can't allocate memory")
    return isinstance(error, RuntimeError) and any(one in said for one in known)


# -- tensors of all ranks ------------------------------------------------------------------------


def gather(tensor: Any) -> Any:
    """Every rank's tensors, one behind the other. Collective."""
    return operations.gather(tensor, current.world())


def gather_object(object: Any) -> Any:
    """The elements of every rank's list. Collective."""
    return operations.gather_objects(object, current.world())


def reduce(tensor: Any, reduction: operations.Reduction = "mean", scale: float = 1.0) -> Any:
    """Mean, sum or maximum of each tensor over ranks. Collective."""
    return operations.reduce(tensor, current.world(), reduction)


def pad_across_processes(
    tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
) -> Any:
    """Tensors as long as the longest of any rank. Collective."""
    return operations.pad(tensor, current.world(), dim, pad_index, first=pad_first)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Give every rank one rank's tensors, in place. Collective."""
    if current.world().size == 1:
        return tensor

    def one(each: torch.Tensor) -> torch.Tensor:
        dist.broadcast(each, src=from_process)
        return each

    return operations.each_tensor(one, tensor)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Give every rank one rank's objects, in place. Collective."""
    if current.world().size > 1:
        dist.broadcast_object_list(object_list, src=from_process)
    return object_list


def wait_for_everyone() -> None:
    """Wait until every rank is here. Collective."""
    current.world().barrier()


# -- nested data ---------------------------------------------------------------------------------


def is_torch_tensor(tensor: Any) -> bool:
    """Whether it is a tensor."""
    return isinstance(tensor, torch.Tensor)


def honor_type(obj: Any, generator: Any) -> Any:
    """A list or tuple of the same class as another."""
    return type(obj)(*generator) if hasattr(obj, "_fields") else type(obj)(generator)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """A function of every tensor in lists, tuples and mappings.

    Raises:
        TypeError: there is something else, and that is to be an error.
    """

    def apply(part: Any) -> Any:
        if isinstance(part, (list, tuple)):
            return honor_type(part, map(apply, part))
        if isinstance(part, Mapping):
            return type(part)({key: apply(value) for key, value in part.items()})  # pyright: ignore[reportCallIssue]
        if test_type(part):
            return func(part, *args, **kwargs)
        if error_on_other_type:
            raise TypeError(f"{type(part).__name__} is not what {test_type.__name__} takes")
        return part

    return apply(data)


def send_to_device(
    tensor: Any, device: Any, non_blocking: bool = False, skip_keys: Any = None
) -> Any:
    """Tensors on a device, whatever holds them."""
    if skip_keys is not None:
        raise ConfigError("send_to_device(skip_keys=…) has no counterpart. Move what is needed.")
    return move_to(tensor, torch.empty((), device=device).device, non_blocking)


def slice_tensors(data: Any, tensor_slice: slice, **kwargs: Any) -> Any:
    """A slice of every tensor."""
    return recursively_apply(lambda one: one[tensor_slice], data)


def listify(data: Any) -> Any:
    """Lists of numbers in the place of tensors."""
    return recursively_apply(lambda one: one.tolist(), data)


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose tensors come out in fp32."""

    @functools.wraps(model_forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(model_forward(*args, **kwargs))

    return call


# -- models and files ----------------------------------------------------------------------------


def extract_model_from_parallel(
    model: nn.Module,
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
    recursive: bool = False,
) -> nn.Module:
    """The module itself of a prepared model."""
    return model.module if isinstance(model, PreparedModel) else model


def is_compiled_module(module: nn.Module) -> bool:
    """Whether ``torch.compile`` has made it."""
    return isinstance(module, torch._dynamo.OptimizedModule)


def save(
    obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """Write an object on rank 0; the others go on.

    Raises:
        ConfigError: it is a part of what ranks divide.
    """
    files.check_whole(obj, ())
    place = current.placement()
    if place.rank == 0 or (save_on_each_node and place.local_rank == 0):
        files.write(obj, f, safe=safe_serialization)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """``torch.load``, of tensors and plain values alone unless told otherwise."""
    return torch.load(f, map_location=map_location, **{"weights_only": True, **kwargs})


def write_basic_config(*args: Any, **kwargs: Any) -> None:
    """Nothing: settings stand in ``unipar.yaml``."""


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """``tqdm.tqdm``, in the first process of each node alone unless told otherwise."""
    from tqdm.auto import tqdm as bar  # pyright: ignore[reportMissingModuleSource]

    hidden = main_process_only and current.placement().local_rank != 0
    return bar(*args, **{**kwargs, "disable": kwargs.get("disable", False) or hidden})


# -- packages ------------------------------------------------------------------------------------


def _available(name: str) -> Callable[..., bool] | None:
    """The function of a name such as ``is_wandb_available``."""
    if not (name.startswith("is_") and name.endswith("_available")):
        return None
    what = name.removeprefix("is_").removesuffix("_available")

    def available(*args: Any, **kwargs: Any) -> bool:
        if what in ("bf16", "fp16"):
            return True
        if what in _DEVICES:
            return getattr(getattr(torch, what, None), "is_available", lambda: False)()
        return importlib.util.find_spec(_PACKAGES.get(what, what)) is not None

    return available


__getattr__ = UTILS.refusing(__name__, _available)
