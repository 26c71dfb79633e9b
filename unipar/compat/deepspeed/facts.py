"""What an engine says of its run: ranks, batches, rates, and what its configuration asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from unipar.compat.deepspeed.checkpoints import Keeping
from unipar.compat.deepspeed.parts import EngineOptimizer
from unipar.compat.deepspeed_config import DEFAULT_CLIPPING, zero_stage
from unipar.compat.run import current
from unipar.errors import ConfigError

_NAMED = ("adagrad", "adam", "adamw")
"""Optimizers whose names DeepSpeed gives in small letters, however they are written."""


class Facts(Keeping):
    """What there is to know of an engine."""

    optimizer: EngineOptimizer | None
    client_optimizer: Any
    config: dict[str, Any]
    global_steps: int
    _accumulation: int
    _clips: bool
    _norm: float | None
    _precision: str
    _size: int

    @property
    def device(self) -> torch.device:
        """This process's."""
        return current.device()

    @property
    def local_rank(self) -> int:
        """This process's rank among those of its node."""
        return current.placement().local_rank

    @property
    def global_rank(self) -> int:
        """This process's rank."""
        return current.placement().rank

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return current.placement().size

    @property
    def dp_world_size(self) -> int:
        """How many of them see different data."""
        return current.world().data_size

    @property
    def mp_world_size(self) -> int:
        """How many of them hold parts of one replica."""
        return self.world_size // self.dp_world_size

    @property
    def data_parallel_group(self) -> Any:
        """The group of ranks that see different data."""
        world = current.world()
        if world.data_size == world.size:
            return torch.distributed.group.WORLD
        return world.mesh("batch").get_group()

    @property
    def dist_backend(self) -> str:
        """What ranks exchange tensors by."""
        return torch.distributed.get_backend()

    mpu = losses = None
    pipeline_parallelism = has_moe_layers = False
    sequence_parallel_size = 1

    @property
    def client_lr_scheduler(self) -> Any:
        """The scheduler, which is stepped after every update."""
        return self.lr_scheduler

    @property
    def basic_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer itself, which the engine steps."""
        return self.optimizer.optimizer if self.optimizer is not None else None

    def get_data_parallel_rank(self) -> int:
        """This process's rank among those that see different data."""
        return current.world().data_rank

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""
        return self._accumulation

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a micro-batch on a rank."""
        return self._size

    def train_batch_size(self) -> int:
        """Samples of a step over all ranks."""
        return self._size * self._accumulation * self.dp_world_size

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples of a step, those of a micro-batch, and micro-batches of a step."""
        return self.train_batch_size(), self._size, self._accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Take another number of micro-batches to a step."""
        steps, left = divmod(train_batch_size, self._size * self.dp_world_size)
        if left or not steps:
            raise ValueError(
                f"{train_batch_size} samples are not a number of micro-batches of {self._size} on "
                f"{self.dp_world_size} ranks"
            )
        self._accumulation = steps

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Take another size of micro-batches."""
        self._size = micro_batch_size

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        return self._of_groups("lr")

    def get_type(self) -> list[Any]:
        """The type of each parameter group, where groups have one."""
        return self._of_groups("type")

    def get_mom(self) -> list[Any]:
        """The momentum of each parameter group, or its betas."""
        named = self.optimizer_name() in ("SGD", "RMSprop")
        return self._of_groups("momentum" if named else "betas")

    def _of_groups(self, key: str) -> list[Any]:
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [group.get(key, 0.0) for group in groups]

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last update's gradients before they were clipped; ``None`` before it.

        DeepSpeed has none at stage 0 in float32. Here there is one where gradients are clipped.

        Raises:
            ConfigError: gradients are not clipped, and nobody has measured it.
        """
        # DeepSpeed 0.19.8, runtime/engine.py, _take_model_step: of its own optimizers only.
        known = self.zero_optimization() or self.fp16_enabled() or self.bfloat16_enabled()
        if self._norm is None and self.global_steps and known and not self._clips:
            raise ConfigError(
                "get_global_grad_norm() is of gradients that are clipped, and gradient_clipping is "
                "0. Set it to a large number, to measure alone."
            )
        return self._norm

    def gradient_clipping(self) -> float:
        """The norm that gradients are clipped to; 0 if they are not."""
        return float(self.config.get("gradient_clipping", DEFAULT_CLIPPING))

    def fp16_enabled(self) -> bool:
        """Return whether the run computes in float16."""
        return self._precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Return whether the run computes in bfloat16, but for the matrix products of ``fp8``."""
        return self._precision in ("bf16", "fp8")

    def loss_scale(self) -> float:
        """The static scale of losses that the configuration asks for; 0: it is dynamic."""
        return float(self._of_fp16("loss_scale", 0))

    def dynamic_loss_scale(self) -> bool:
        """Return whether the configuration asks for no static scale of losses."""
        return self.loss_scale() == 0

    def initial_dynamic_scale(self) -> float:
        """The scale of losses that the configuration asks to begin with."""
        return 2.0 ** self._of_fp16("initial_scale_power", 16)

    def _of_fp16(self, key: str, default: Any) -> Any:
        section = self.config.get("fp16")
        return section.get(key, default) if isinstance(section, Mapping) else default

    def zero_optimization(self) -> bool:
        """Return whether the configuration asks for ZeRO, whatever the strategy."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        """The stage of ZeRO that the configuration asks for, whatever the strategy."""
        return zero_stage(self.config)

    def optimizer_name(self) -> str | None:
        """The class of what the script gave as its optimizer; else what the configuration names."""
        if self.client_optimizer is not None:
            return type(self.client_optimizer).__name__
        named = (self.config.get("optimizer") or {}).get("type")
        return named.lower() if named and named.lower() in _NAMED else named

    def optimizer_params(self) -> dict[str, Any] | None:
        """The arguments of the optimizer that the configuration names."""
        return (self.config.get("optimizer") or {}).get("params")

    def scheduler_name(self) -> str | None:
        """The scheduler that the configuration names."""
        return (self.config.get("scheduler") or {}).get("type")

    def scheduler_params(self) -> dict[str, Any] | None:
        """The arguments of the scheduler that the configuration names."""
        return (self.config.get("scheduler") or {}).get("params")

    def steps_per_print(self) -> int | None:
        """What the configuration says; nothing is printed."""
        return self.config.get("steps_per_print")

    def wall_clock_breakdown(self) -> bool:
        """What the configuration says; nothing is printed."""
        return bool(self.config.get("wall_clock_breakdown", False))
