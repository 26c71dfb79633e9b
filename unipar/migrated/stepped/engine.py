"""The engine that :mod:`unipar.migrated.stepped` makes, and its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unipar.checkpoint.directory import find
from unipar.errors import CheckpointError
from unipar.migrated import script
from unipar.strategy import Engine

_OWN = "engine.pt"


class SteppedEngine:
    """A model under a strategy, that is stepped on for every micro-batch.

    Args:
        engine: what trains it.
        model: the model.
        accumulation_steps: micro-batches of a step.
        micro_batch_size: samples of a micro-batch on a rank; 0 where that is not known.
        lr_scheduler: is stepped after every update.

    Attributes:
        module: the model.
        lr_scheduler: as given.
        micro_steps: micro-batches so far.
        global_steps: updates so far.
    """

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        *,
        accumulation_steps: int,
        micro_batch_size: int,
        lr_scheduler: Any = None,
    ) -> None:
        self._engine, self.module, self.lr_scheduler = engine, model, lr_scheduler
        self._accumulation, self._size = accumulation_steps, micro_batch_size
        self.micro_steps = self.global_steps = 0
        self._boundary: bool | None = None
        self._norm: float | None = None

    # -- the loop --------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine(*args, **kwargs)

    forward = __call__

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        """Add the gradients of a micro-batch.

        Args:
            loss: scalar tensor; it is divided by the number of micro-batches of a step.

        Returns:
            The divided loss.
        """
        part = loss / self._accumulation
        script.backward(part, self.module)
        return part

    def step(self) -> None:
        """Count the micro-batch, and update the weights if it is the last of a step."""
        if self.is_gradient_accumulation_boundary():
            result = self._engine.step()
            self._norm = result.grad_norm
            self.global_steps += 1
            if self.lr_scheduler is not None and not result.skipped:
                self.lr_scheduler.step()
        self.micro_steps += 1

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether this micro-batch is the last of a step; after ``step()``, the next one."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self._accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say from now on whether micro-batches are the last of a step, instead of counting."""
        self._boundary = is_boundary

    def train(self, mode: bool = True) -> SteppedEngine:
        self.module.train(mode)
        return self

    def eval(self) -> SteppedEngine:
        return self.train(False)

    # -- what there is to know -------------------------------------------------------------------

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self._engine.optimizer

    @property
    def training(self) -> bool:
        return self.module.training

    @property
    def device(self) -> torch.device:
        return script.device()

    @property
    def local_rank(self) -> int:
        return script.placement().local_rank

    @property
    def global_rank(self) -> int:
        return script.world().rank

    @property
    def world_size(self) -> int:
        return script.world().size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""
        return self._accumulation

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a micro-batch on a rank."""
        return self._size

    def train_batch_size(self) -> int:
        """Samples of a step over all ranks."""
        return self._size * self._accumulation * script.world().data_size

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups] if self.optimizer else []

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradients before clipping; ``None`` if they are not."""
        return self._norm

    def fp16_enabled(self) -> bool:
        """Return whether the run computes in float16."""
        return script.settings().precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Return whether the run computes in bfloat16, but for the matrix products of ``fp8``."""
        return script.settings().precision in ("bf16", "fp8")

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters()

    # -- checkpoints -----------------------------------------------------------------------------

    def save_checkpoint(
        self, save_dir: str | Path, tag: str | int | None = None, client_state: Any = None
    ) -> bool:
        """Write a checkpoint that any strategy and number of ranks loads. Collective.

        Args:
            save_dir: holds checkpoints, each in a directory of its tag.
            tag: left out: ``global_step`` and the number of updates.
            client_state: kept beside it; plain values and tensors.

        Raises:
            CheckpointError: it cannot be written.
        """
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        path = script.session().save(Path(save_dir) / name)
        scheduler = self.lr_scheduler
        own = {
            "client_state": dict(client_state or {}),
            "micro_steps": self.micro_steps,
            "global_steps": self.global_steps,
            "lr_scheduler": scheduler.state_dict() if scheduler is not None else None,
        }
        if script.world().is_main:
            torch.save(own, path / _OWN)
            (Path(save_dir) / "latest").write_text(name)
        script.world().barrier()
        return True

    def load_checkpoint(
        self, load_dir: str | Path, tag: str | int | None = None
    ) -> tuple[str | None, dict[str, Any]]:
        """Take over a checkpoint of :meth:`save_checkpoint`. Collective.

        Args:
            load_dir: holds checkpoints.
            tag: which; left out: the latest.

        Returns:
            Where it is, and its ``client_state``; ``None`` and nothing where there is none.

        Raises:
            CheckpointError: it is of another program, or DeepSpeed's own.
        """
        latest = Path(load_dir) / "latest"
        if tag is None:
            tag = latest.read_text().strip() if latest.is_file() else None
        tag = script.world().broadcast(tag)
        if tag is None:
            return None, {}
        directory = Path(load_dir) / str(tag)
        if any(directory.glob("*model_states.pt")):
            raise CheckpointError(
                f"{directory} is DeepSpeed's own checkpoint. Convert it: unipar convert --from "
                f"deepspeed {directory} {directory}-unipar, and load what that writes."
            )
        path = find(directory)
        script.session().load(path)
        own = torch.load(path / _OWN, weights_only=True, map_location="cpu")
        self.micro_steps, self.global_steps = own["micro_steps"], own["global_steps"]
        if self.lr_scheduler is not None and own["lr_scheduler"] is not None:
            self.lr_scheduler.load_state_dict(own["lr_scheduler"])
        return str(directory), own["client_state"]
