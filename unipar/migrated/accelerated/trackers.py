"""Experiment trackers of a migrated script: unipar's loggers, by the names that Accelerate has."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from unipar.callbacks.loggers import LOGGERS
from unipar.callbacks.loggers.base import Logger
from unipar.callbacks.records import RunInfo
from unipar.errors import ConfigError
from unipar.world import World

_PROJECT = {"tensorboard": None, "wandb": "project", "mlflow": "experiment", "trackio": "project"}
"""The trackers, and what each calls the project."""


class Trackers:
    """Trackers that rank 0 writes to.

    Args:
        names: of trackers; ``all`` takes those whose packages are installed.
        directory: where those that write files do so.

    Raises:
        ConfigError: a name is unknown, or its package is missing.
    """

    def __init__(self, names: str | Iterable[str] | None, directory: Path) -> None:
        listed = [names] if isinstance(names, str) else list(names or ())
        for name in listed:
            if not isinstance(name, str) or name not in (*_PROJECT, "all"):
                raise ConfigError(
                    f"there is no tracker {name!r} here. Choose of {', '.join(_PROJECT)}, or all."
                )
        self._kinds: dict[str, type[Logger]] = {}
        for name in _PROJECT:
            module, _, kind = LOGGERS[name].partition(":")
            logger = getattr(importlib.import_module(module), kind)
            if name in listed:
                logger.check()
            if name in listed or ("all" in listed and _is_installed(logger)):
                self._kinds[name] = logger
        self._directory = directory
        self._open: list[Logger] = []
        self._step = 0

    def start(self, project: str, config: Mapping[str, Any] | None, world: World) -> None:
        """Open them on rank 0; ``project`` names the directory, or the tracker's project."""
        if not world.is_main:
            return
        run = RunInfo(
            strategy="script", world_size=world.size, device=world.device.type, total_steps=None,
            epochs=None, global_batch_size=0, num_parameters=0,
            output_dir=self._directory / project, config=dict(config or {}),
        )  # fmt: skip
        for name, kind in self._kinds.items():
            keyword = _PROJECT[name]
            logger = kind(**({keyword: project} if keyword else {}))
            logger.start(run)
            self._open.append(logger)

    def log(self, values: Mapping[str, Any], step: int | None) -> None:
        """Write numbers of a step; left out: the one after the last.

        Raises:
            ConfigError: a value is no number.
        """
        self._step = self._step + 1 if step is None else step
        if not self._open:
            return
        metrics: dict[str, float] = {}
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = value.item()
            if not isinstance(value, (int, float)):
                raise ConfigError(
                    f"'{name}' is {type(value).__name__}, and trackers take numbers here. "
                    "Log a number, or write it yourself where is_main_process holds."
                )
            metrics[name] = value
        for logger in self._open:
            logger.log(metrics, self._step)

    def close(self) -> None:
        """Write what is pending."""
        while self._open:
            self._open.pop().close()


def _is_installed(logger: type[Logger]) -> bool:
    try:
        logger.check()
    except ConfigError:
        return False
    return True
