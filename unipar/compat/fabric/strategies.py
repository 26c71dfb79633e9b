"""Fabric's strategies as options of the run's, read when the run begins.

Fields are the real classes' arguments, and then those that they hand on to DDP and FSDP.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import nn

from unipar.compat.checked import Checked
from unipar.compat.deepspeed_config import load_config, read_config
from unipar.compat.fabric_names import STRATEGIES, refuse
from unipar.compat.run import current
from unipar.errors import ConfigError

_TIMEOUT = timedelta(seconds=1800)
_OBJECTS = ("accelerator", "parallel_devices", "checkpoint_io")


class Strategy:
    """Where this process stands. ``fabric.strategy`` is one, whatever runs the script."""

    @property
    def root_device(self) -> torch.device:
        """This process's device."""
        return current.device()

    @property
    def global_rank(self) -> int:
        """This process's rank."""
        return current.placement().rank

    @property
    def local_rank(self) -> int:
        """This process's rank among those of its node."""
        return current.placement().local_rank

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return current.placement().size

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.global_rank == 0

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait until every rank is here. Collective."""
        current.world().barrier()

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks say yes, or any. Collective."""
        said = sum(map(bool, current.world().gather(decision)))
        return said == self.world_size if all else said > 0

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"fabric.strategy has no {name} here: strategies are unipar's. Use what Fabric itself "
            "has."
        )


class ParallelStrategy(Strategy, Checked):
    """One for several processes."""

    def options(self) -> dict[str, Any]:
        """The run's strategy, with its options.

        Raises:
            ConfigError: something has no counterpart.
        """
        raise NotImplementedError

    def more(self) -> dict[str, Any]:
        """Further settings of a run, whatever its strategy.

        ``prepare`` among them are arguments of :meth:`unipar.Session.prepare`.
        """
        timeout, precision = getattr(self, "timeout", None), getattr(self, "precision", None)
        found: dict[str, Any] = {} if precision is None else {"precision": precision}
        if timeout is not None and timeout != _TIMEOUT:
            found["timeout"] = timeout.total_seconds()
        return found


class SingleDeviceStrategy(Strategy):
    """One for a single process, which Fabric takes by itself."""

    def __init__(self, device: Any = "cpu", **kwargs: Any) -> None:
        refuse("SingleDeviceStrategy(…)")


@dataclass
class DDPStrategy(ParallelStrategy):
    """Options of the strategy ``ddp``."""

    REFUSED: ClassVar = _OBJECTS
    IGNORED: ClassVar = ("cluster_environment", "process_group_backend")
    _OPTIONS: ClassVar = ("broadcast_buffers", "bucket_cap_mb", "find_unused_parameters",
                          "gradient_as_bucket_view", "static_graph")  # fmt: skip

    accelerator: Any = None
    parallel_devices: Any = None
    cluster_environment: Any = None
    checkpoint_io: Any = None
    precision: Any = None
    process_group_backend: str | None = None
    timeout: timedelta | None = _TIMEOUT
    start_method: str = "popen"
    broadcast_buffers: bool = True
    bucket_cap_mb: int | None = None
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False

    def options(self) -> dict[str, Any]:
        self.check()
        return {"name": "ddp", **{k: v for k, v in self.changed().items() if k in self._OPTIONS}}


_SHARDING = {"FULL_SHARD": "full", "SHARD_GRAD_OP": "grad_op", "HYBRID_SHARD": "hybrid"}


@dataclass
class FSDPStrategy(ParallelStrategy):
    """Options of the strategy ``fsdp``."""

    REFUSED: ClassVar = (*_OBJECTS, "mixed_precision", "ignored_modules", "ignored_states",
                         "param_init_fn")  # fmt: skip
    IGNORED: ClassVar = (
        "cluster_environment", "process_group_backend", "state_dict_type", "backward_prefetch",
        "forward_prefetch", "limit_all_gathers", "sync_module_states", "use_orig_params",
    )  # fmt: skip

    accelerator: Any = None
    parallel_devices: Any = None
    cluster_environment: Any = None
    precision: Any = None
    process_group_backend: str | None = None
    timeout: timedelta | None = _TIMEOUT
    cpu_offload: Any = None
    mixed_precision: Any = None
    auto_wrap_policy: Any = None
    activation_checkpointing: Any = None
    activation_checkpointing_policy: Any = None
    sharding_strategy: Any = "FULL_SHARD"
    state_dict_type: str = "sharded"
    device_mesh: Any = None
    backward_prefetch: Any = None
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    sync_module_states: bool = False
    use_orig_params: bool = True
    ignored_modules: Any = None
    ignored_states: Any = None
    param_init_fn: Any = None
    checkpoint_io: Any = field(default=None, init=False)

    def options(self) -> dict[str, Any]:
        self.check()
        found: dict[str, Any] = {"name": "fsdp"}
        word = getattr(self.sharding_strategy, "name", str(self.sharding_strategy)).upper()
        if word not in _SHARDING:
            raise ConfigError(
                f"FSDPStrategy(sharding_strategy={word!r}) has no counterpart. Use one of "
                f"{', '.join(_SHARDING)}, or strategy='ddp' for NO_SHARD."
            )
        if _SHARDING[word] != "full":
            found["sharding"] = _SHARDING[word]
        if self.device_mesh is not None:
            if not isinstance(self.device_mesh, tuple) or _SHARDING[word] != "hybrid":
                refuse("FSDPStrategy(device_mesh=…)")
            found["shard_size"] = self.device_mesh[1]
        if getattr(self.cpu_offload, "offload_params", self.cpu_offload):
            found["cpu_offload"] = True
        if self.auto_wrap_policy is not None:
            found |= _wrapping(self.auto_wrap_policy)
        return found

    def more(self) -> dict[str, Any]:
        recomputed = self.activation_checkpointing or self.activation_checkpointing_policy
        prepare = {"activation_checkpointing": _class_names(recomputed)} if recomputed else {}
        return super().more() | {"prepare": prepare}


def _wrapping(policy: Any) -> dict[str, Any]:
    """What a policy that is no function of the script's own says."""
    given = policy.keywords if isinstance(policy, functools.partial) else {}
    if "min_num_params" in given:
        return {"wrap_min_params": int(given["min_num_params"])}
    classes = given.get("transformer_layer_cls", getattr(policy, "_module_classes", policy))
    return {"wrap": _class_names(classes)}


def _class_names(given: Any) -> tuple[str, ...]:
    listed = isinstance(given, Iterable) and not isinstance(given, type)
    classes: list[Any] = list(given) if listed else [given]
    if not all(isinstance(one, type) and issubclass(one, nn.Module) for one in classes):
        raise ConfigError(
            f"{given!r} is a function, which strategies do not take. Give classes of modules, such "
            "as auto_wrap_policy={Block} and activation_checkpointing={Block}."
        )
    return tuple(sorted(one.__name__ for one in classes))


@dataclass
class DeepSpeedStrategy(ParallelStrategy):
    """Options of the strategies ``zero1``, ``zero2``, ``zero3`` and ``deepspeed``."""

    REFUSED: ClassVar = (
        *_OBJECTS, "partition_activations", "cpu_checkpointing", "contiguous_memory_optimization",
        "synchronize_checkpoint_boundary", "exclude_frozen_parameters",
    )  # fmt: skip
    IGNORED: ClassVar = (
        "remote_device", "params_buffer_count", "params_buffer_size", "max_in_cpu",
        "optimizer_buffer_count", "block_size", "queue_depth", "single_submit", "overlap_events",
        "thread_count", "allgather_partitions", "reduce_scatter", "zero_allow_untested_optimizer",
        "logging_batch_size_per_gpu", "logging_level", "cluster_environment", "load_full_weights",
        "process_group_backend",
    )  # fmt: skip
    _ZERO: ClassVar = ("sub_group_size", "contiguous_gradients", "overlap_comm",
                       "allgather_bucket_size", "reduce_bucket_size")  # fmt: skip
    _FP16: ClassVar = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis",
                       "min_loss_scale")  # fmt: skip

    accelerator: Any = None
    zero_optimization: bool = True
    stage: int = 2
    remote_device: str | None = None
    offload_optimizer: bool = False
    offload_parameters: bool = False
    offload_params_device: str = "cpu"
    nvme_path: str = "/local_nvme"
    params_buffer_count: int = 5
    params_buffer_size: int = 100_000_000
    max_in_cpu: int = 1_000_000_000
    offload_optimizer_device: str = "cpu"
    optimizer_buffer_count: int = 4
    block_size: int = 1048576
    queue_depth: int = 8
    single_submit: bool = False
    overlap_events: bool = True
    thread_count: int = 1
    pin_memory: bool = False
    sub_group_size: int = 1_000_000_000_000
    contiguous_gradients: bool = True
    overlap_comm: bool = True
    allgather_partitions: bool = True
    reduce_scatter: bool = True
    allgather_bucket_size: int = 200_000_000
    reduce_bucket_size: int = 200_000_000
    zero_allow_untested_optimizer: bool = True
    logging_batch_size_per_gpu: int | None = None
    config: Any = None
    logging_level: int = 30
    parallel_devices: Any = None
    cluster_environment: Any = None
    loss_scale: float = 0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    min_loss_scale: int = 1
    partition_activations: bool = False
    cpu_checkpointing: bool = False
    contiguous_memory_optimization: bool = False
    synchronize_checkpoint_boundary: bool = False
    load_full_weights: bool = False
    precision: Any = None
    process_group_backend: str | None = None
    timeout: timedelta | None = _TIMEOUT
    exclude_frozen_parameters: bool = False
    checkpoint_io: Any = field(default=None, init=False)

    def options(self) -> dict[str, Any]:
        self.check()
        return self._read["strategy"]

    def more(self) -> dict[str, Any]:
        found = self._read
        if found.get("accumulation", 1) != 1:
            refuse("DeepSpeedStrategy(config={'gradient_accumulation_steps': …})")
        own = {key: found[key] for key in ("precision", "loss_scale") if key in found}
        limit = found.get("max_grad_norm")
        prepare = {} if limit is None else {"max_grad_norm": limit}
        return own | super().more() | {"prepare": prepare}

    @functools.cached_property
    def _read(self) -> dict[str, Any]:
        config = self._written() if self.config is None else load_config(self.config)
        # As Fabric 2.6 has it (strategies/deepspeed.py, _format_precision_config).
        config.setdefault("fp16", {name: getattr(self, name) for name in self._FP16})
        return read_config(config)

    def _written(self) -> dict[str, Any]:
        """The configuration that the arguments make."""
        zero: dict[str, Any] = {"stage": self.stage if self.zero_optimization else 0}
        for asked, key, device in (
            (self.offload_optimizer, "offload_optimizer", self.offload_optimizer_device),
            (self.offload_parameters, "offload_param", self.offload_params_device),
        ):
            if asked:
                zero[key] = {"device": device, "pin_memory": self.pin_memory}
                if device == "nvme":
                    zero[key]["nvme_path"] = self.nvme_path
        zero |= {k: v for k, v in self.changed().items() if k in self._ZERO}
        return {"zero_optimization": zero}


@dataclass
class ModelParallelStrategy(ParallelStrategy):
    """Nothing that can be kept: ``unipar.yaml`` has to say what runs the script instead."""

    parallelize_fn: Any
    data_parallel_size: Any = "auto"
    tensor_parallel_size: Any = "auto"
    save_distributed_checkpoint: bool = True
    process_group_backend: str | None = None
    timeout: timedelta | None = _TIMEOUT

    def options(self) -> dict[str, Any]:
        refuse("ModelParallelStrategy(…)")


NAMED: dict[str, Any] = {
    "ddp": DDPStrategy,
    **{f"ddp_{how}": functools.partial(DDPStrategy, start_method=how)
       for how in ("spawn", "fork", "notebook")},
    "ddp_find_unused_parameters_true": functools.partial(DDPStrategy, find_unused_parameters=True),
    "fsdp": FSDPStrategy,
    "fsdp_cpu_offload": functools.partial(FSDPStrategy, cpu_offload=True),
    "deepspeed": DeepSpeedStrategy,
    **{f"deepspeed_stage_{n}": functools.partial(DeepSpeedStrategy, stage=n) for n in (1, 2, 3)},
    **{f"deepspeed_stage_{n}_offload": functools.partial(
        DeepSpeedStrategy, stage=n, offload_optimizer=True, offload_parameters=n == 3
    ) for n in (1, 2, 3)},
    "deepspeed_stage_3_offload_nvme": functools.partial(
        DeepSpeedStrategy, stage=3, offload_optimizer=True, offload_parameters=True,
        offload_params_device="nvme", offload_optimizer_device="nvme",
    ),
}  # fmt: skip
"""The strategies that have a name."""

__getattr__ = STRATEGIES.refusing(__name__)
