"""Local SGD, which no strategy does: it is there for scripts that can turn it off."""

from __future__ import annotations

from typing import Any

from unipar.compat.accelerate.processes import Processes
from unipar.compat.accelerate_names import refuse
from unipar.compat.tables import Table


class LocalSGD:
    """Nothing on one process, or where it is turned off.

    Raises:
        ConfigError: replicas are asked to differ for some steps.
    """

    def __init__(
        self, accelerator: Processes, model: Any, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        if enabled and accelerator.use_distributed:
            refuse("LocalSGD(enabled=True)")

    def __enter__(self) -> LocalSGD:
        return self

    def __exit__(self, *error: object) -> None:
        return

    def step(self) -> None:
        """Nothing."""


__getattr__ = Table("accelerate.local_sgd").refusing(__name__)
