"""The job that all cells share, and how it reaches the processes that run it."""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle

from unipar.benchmark.cells import Cell
from unipar.errors import ConfigError
from unipar.utils.own_path import own_path

LEFT_OUT = (
    "eval_data",
    "metrics",
    "predict",
    "callbacks",
    "loggers",
    "config",
    "num_nodes",
    "launcher",
)
"""Arguments of ``fit`` that say nothing of a training step, or that a benchmark sets itself."""


@dataclass
class BenchJob:
    """The job that is trained, and its length.

    Attributes:
        arguments: of :func:`unipar.fit`, ``model`` and ``data`` included.
        warmup: steps whose times are discarded.
        steps: steps that are timed.
        path: where its modules are imported from, besides an environment's own packages.
    """

    arguments: dict[str, Any]
    warmup: int
    steps: int
    path: list[str] = field(default_factory=own_path)

    def of(self, cell: Cell, steps: int, **more: Any) -> dict[str, Any]:
        """The arguments of :func:`unipar.fit` for one cell."""
        kept = {key: value for key, value in self.arguments.items() if key not in LEFT_OUT}
        return {
            **kept,
            "strategy": cell.strategy,
            "devices": cell.devices,
            "precision": cell.precision,
            "micro_batch_size": cell.micro_batch_size,
            "steps": steps,
            "epochs": None,
            "eval_every": None,
            "checkpoint": False,
            "resume": None,
            "max_restarts": 0,
            "progress": False,
            "log_level": "warning",
            # Losses are compared here, too, and it would be in the time that setting up takes.
            "self_test": False,
            **more,
        }

    def write(self, file: Path) -> None:
        """Store it for processes of any environment with this Python and torch.

        Raises:
            ConfigError: something in it cannot be sent to another process.
        """
        try:
            content = cloudpickle.dumps((self.path, cloudpickle.dumps(self)))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"the benchmark's processes cannot be sent the job: {error}. The model, the data "
                "and all functions are copied to them: create open files, locks and connections "
                "inside of those functions."
            ) from error
        file.write_bytes(content)

    @staticmethod
    def read(file: Path) -> BenchJob:
        """Read what :meth:`write` has stored; makes its modules importable.

        Raises:
            ConfigError: a module of the job is not importable here.
        """
        path, content = pickle.loads(file.read_bytes())
        sys.path.extend(entry for entry in path if entry not in sys.path)
        try:
            return pickle.loads(content)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"{sys.executable} cannot load the job: {error}. What the model and the data "
                "import must be installed in every environment that takes part."
            ) from error
