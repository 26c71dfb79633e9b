"""Several optimizers that look like one to a framework; likewise their schedulers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unipar.errors import ConfigError

OPTIMIZER = "optimizer"
"""The key of a parameter group that names the one of several optimizers that it belongs to."""


class CombinedOptimizer(Optimizer):
    """Several optimizers, each over other parameters, in the place of one.

    ``param_groups`` has the groups of all of them, the same dictionaries, each with its optimizer's
    name at :data:`OPTIMIZER`; ``state`` is one mapping for all. Both are the truth, as of any
    optimizer: a framework may put others in their place, as DeepSpeed does to update one group at a
    time, and a step goes by what it finds.

    Args:
        optimizers: by name; the order of their groups follows.

    Attributes:
        optimizers: by name.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        # Given the groups, it would compare and change them.
        super().__init__([{"params": []}], {})
        self.optimizers = dict(optimizers)
        self.param_groups = []
        for name, optimizer in self.optimizers.items():
            for group in optimizer.param_groups:
                group[OPTIMIZER] = name
                self.param_groups.append(group)
            self.state.update(optimizer.state)
            optimizer.state = self.state

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, closure: Callable[[], Any] | None = None
    ) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for name, groups in self._groups().items():
            if not groups:
                continue
            optimizer = self.optimizers[name]
            own = optimizer.param_groups
            optimizer.param_groups, optimizer.state = groups, self.state
            try:
                optimizer.step()
            finally:
                # A scheduler counts on the groups that it was built over.
                optimizer.param_groups = own
        return loss

    def _groups(self) -> dict[str, list[dict[str, Any]]]:
        """The groups that there are now, by optimizer."""
        groups: dict[str, list[dict[str, Any]]] = {name: [] for name in self.optimizers}
        for group in self.param_groups:
            name: Any = group.get(OPTIMIZER)
            if name not in groups:
                raise ConfigError(
                    f"a parameter group has {OPTIMIZER}={name!r}, and the optimizers of this run "
                    f"are {', '.join(self.optimizers)}. Name one of them in the group."
                )
            groups[name].append(group)
        return groups

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "optimizers": self.optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name, groups in self._groups().items():
            optimizer = self.optimizers[name]
            parameters = [p for group in groups for p in group["params"]]
            # Some of torch's bring old state up to date, and expect no other's among it.
            own = {p: self.state[p] for p in parameters if p in self.state}
            optimizer.__setstate__({"state": own, "param_groups": groups})
            optimizer.state = self.state


class CombinedScheduler(LRScheduler):
    """The schedulers of several optimizers, stepped together.

    Args:
        optimizer: the several; not all of them need a scheduler.
        schedulers: by the optimizer's name.

    Attributes:
        schedulers: by the optimizer's name.
    """

    def __init__(self, optimizer: CombinedOptimizer, schedulers: Mapping[str, LRScheduler]) -> None:
        # Not torch's own constructor, which takes a first step; see its ChainedScheduler.
        self.optimizer = optimizer
        self.schedulers = dict(schedulers)
        self.last_epoch = 0

    def step(self, epoch: int | None = None) -> None:
        self.last_epoch += 1
        for scheduler in self.schedulers.values():
            scheduler.step()

    def get_last_lr(self) -> list[float | torch.Tensor]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        states = {name: scheduler.state_dict() for name, scheduler in self.schedulers.items()}
        return {"last_epoch": self.last_epoch, "schedulers": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        states = state_dict["schedulers"]
        if states.keys() != self.schedulers.keys():
            raise ValueError(
                f"it has schedulers of {', '.join(states)}, and this run of "
                f"{', '.join(self.schedulers)}"
            )
        self.last_epoch = state_dict["last_epoch"]
        for name, scheduler in self.schedulers.items():
            scheduler.load_state_dict(states[name])


def optimizers_in(optimizer: Optimizer) -> dict[str, Optimizer]:
    """The several optimizers by name, or the one by an empty name."""
    if isinstance(optimizer, CombinedOptimizer):
        return optimizer.optimizers
    return {"": optimizer}


def schedulers_in(scheduler: LRScheduler | None) -> dict[str, LRScheduler]:
    """The schedulers of several optimizers by name, or the one, if any, by an empty name."""
    if isinstance(scheduler, CombinedScheduler):
        return scheduler.schedulers
    return {} if scheduler is None else {"": scheduler}
