"""The optimizer that :meth:`Accelerator.prepare` gives back, under Accelerate's name."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from unipar.compat.optimizers import PreparedOptimizer
from unipar.compat.tables import Table
from unipar.errors import ConfigError

__all__ = ["AcceleratedOptimizer"]

__getattr__ = Table("accelerate.optimizer").refusing(__name__)


class AcceleratedOptimizer(PreparedOptimizer):
    """A prepared optimizer whose modes may be set whether it has some or none.

    Attributes:
        schedule: what steps after each update, where the script's own calls of it do not.
    """

    schedule: Any = None

    def take_step(self) -> None:
        """Step, and then the schedule unless the step was skipped."""
        super().take_step()
        if self.schedule is not None and not self.step_was_skipped:
            self.schedule.step()

    def train(self) -> None:
        """Put the weights into the model that it steps by, as schedule-free optimizers do."""
        self._set_mode("train")

    def eval(self) -> None:
        """Put the weights into the model that an evaluation is of."""
        self._set_mode("eval")

    def _set_mode(self, mode: str) -> None:
        # Accelerate 1.15, optimizer.py: nothing where the optimizer has no such method.
        set_mode: Any = getattr(self.optimizer, mode, None)
        if callable(set_mode):
            set_mode()


def check_kept(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer in whose place Accelerate would put one that steps otherwise.

    As ``map_pytorch_optim_to_deepspeed`` of Accelerate 1.15.0 chooses it: DeepSpeed's Adagrad for
    Adagrad, its Adam for anything else, with decoupled weight decay for AdamW alone.

    Raises:
        ConfigError: it is none whose steps these are.
    """
    decoupled = isinstance(optimizer, torch.optim.AdamW)

    def is_adam(group: dict[str, Any]) -> bool:
        return not group["amsgrad"] and (
            not group["weight_decay"] or group["decoupled_weight_decay"] is decoupled
        )

    def is_adagrad(group: dict[str, Any]) -> bool:
        return not group["lr_decay"] and not group["initial_accumulator_value"]

    step = inspect.unwrap(type(optimizer).step)
    for kind, is_alike in ((torch.optim.Adam, is_adam), (torch.optim.Adagrad, is_adagrad)):
        if (
            isinstance(optimizer, kind) and step is inspect.unwrap(kind.step)
            and all(is_alike(one) and not one["maximize"] for one in optimizer.param_groups)
        ):  # fmt: skip
            return
    used = "Adagrad" if isinstance(optimizer, torch.optim.Adagrad) else "Adam"
    raise ConfigError(
        f"prepare({type(optimizer).__name__}): where a DeepSpeedPlugin offloads the optimizer, "
        f"Accelerate trains by DeepSpeedCPU{used} in its place, whose steps are others. Say "
        "'zero_force_ds_cpu_optimizer': False in DeepSpeedPlugin(hf_ds_config=…), and both keep "
        "it; or give AdamW, without amsgrad and maximize."
    )
