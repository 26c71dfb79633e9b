"""Experiment trackers: unipar's loggers, by the names that Accelerate has, and the script's own."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from unipar.callbacks.loggers import LOGGERS
from unipar.callbacks.loggers.base import Logger
from unipar.callbacks.records import RunInfo
from unipar.compat.run import current
from unipar.compat.tables import Table
from unipar.errors import ConfigError
from unipar.world import World

_PROJECT = {"tensorboard": None, "wandb": "project", "mlflow": "experiment", "trackio": "project"}
"""The trackers, and what each calls the project."""


class GeneralTracker:
    """What a script's own tracker is derived from.

    It has ``name``, ``requires_logging_directory`` and ``tracker``, and overrides what it needs.

    Attributes:
        main_process_only: whether it is called on rank 0 alone.
    """

    main_process_only = True
    name = ""

    def __init__(self, _blank: bool = False) -> None:
        missing = [] if _blank else [
            one for one in ("name", "requires_logging_directory", "tracker") if one not in dir(self)
        ]  # fmt: skip
        if missing:
            raise ConfigError(
                f"the tracker {type(self).__name__} lacks {', '.join(missing)}. Define it in the "
                "class."
            )

    def start(self) -> None:
        """Begin; nothing unless overridden."""

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Write the configuration of the run; nothing unless overridden."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write numbers of a step; nothing unless overridden."""

    def finish(self) -> None:
        """End; nothing unless overridden."""


class LoggerTracker(GeneralTracker):
    """One of unipar's loggers. It takes numbers only.

    Args:
        name: of the tracker.
        logger: what writes.
        project: names the directory, or the tracker's project.
        directory: where those that write files do so.
        world: the joined processes.
    """

    def __init__(
        self, name: str, logger: Logger, project: str, directory: Path, world: World
    ) -> None:
        self.name, self._logger, self._step = name, logger, 0
        self._run = RunInfo(
            strategy="script", world_size=world.size, device=world.device.type, total_steps=None,
            epochs=None, global_batch_size=0, num_parameters=0, output_dir=directory / project,
            config={},
        )  # fmt: skip
        self._started = False

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Write the configuration of the run."""
        self._run = replace(self._run, config=dict(values))
        self._begin()

    def _begin(self) -> None:
        if not self._started:
            self._logger.start(self._run)
            self._started = True

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write numbers of a step; left out: the one after the last.

        Raises:
            ConfigError: a value is no number.
        """
        self._begin()
        self._step = self._step + 1 if step is None else step
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
        self._logger.log(metrics, self._step)

    def finish(self) -> None:
        """Write what is pending."""
        self._begin()
        self._logger.close()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"tracker '{self.__dict__.get('name')}' is one of unipar's loggers, and has no "
            f"{name}. Write what is no number yourself where is_main_process holds."
        )


class Trackers:
    """The trackers that a script asks for.

    Args:
        wanted: names, and objects of the script's own; ``all`` takes those whose packages are
            installed.
        directory: where those that write files do so.

    Attributes:
        names: what was asked for, by name.
        open: those that are open on this rank.

    Raises:
        ConfigError: a name is unknown, or its package is missing.
    """

    def __init__(self, wanted: Any, directory: Path | None) -> None:
        listed = list(wanted) if isinstance(wanted, (list, tuple)) else [wanted] * bool(wanted)
        self._own = [one for one in listed if isinstance(one, GeneralTracker)]
        self.names = [str(one) for one in listed if one not in self._own]
        for name in self.names:
            if name not in (*_PROJECT, "all"):
                raise ConfigError(
                    f"there is no tracker {name!r} here. Choose of {', '.join(_PROJECT)}, or all; "
                    "or derive one of your own from GeneralTracker."
                )
        self._kinds: dict[str, type[Logger]] = {}
        for name in _PROJECT:
            module, _, kind = LOGGERS[name].partition(":")
            logger = getattr(importlib.import_module(module), kind)
            if name in self.names:
                logger.check()
            if name in self.names or ("all" in self.names and _is_installed(logger)):
                self._kinds[name] = logger
        if "tensorboard" in self.names and directory is None:
            raise ConfigError(
                "log_with='tensorboard' writes files. Say where: Accelerator(project_dir='runs')."
            )
        self._directory = directory or Path()
        self.open: list[GeneralTracker] = []

    def start(
        self,
        project: str,
        config: Mapping[str, Any] | None,
        world: World,
        arguments: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Open them, unipar's on rank 0 alone.

        Args:
            project: names the directory, or the tracker's project.
            config: of the run.
            world: the joined processes.
            arguments: more of a logger's own, by the tracker's name.

        Raises:
            ConfigError: a logger does not take one of them.
        """
        self.open += [one for one in self._own if world.is_main or not one.main_process_only]
        for name, kind in self._kinds.items():
            keyword = _PROJECT[name]
            try:
                named = {keyword: project} if keyword else {}
                logger = kind(**{**named, **arguments.get(name, {})})
            except TypeError as error:
                raise ConfigError(
                    f"init_kwargs of '{name}': {error}. They are arguments of unipar's "
                    f"{kind.__name__} here."
                ) from error
            if world.is_main:
                self.open.append(LoggerTracker(name, logger, project, self._directory, world))
        for one in self.open:
            one.start()
            if config is not None:
                one.store_init_configuration(config)

    def find(self, name: str) -> GeneralTracker:
        """The tracker of a name; a blank one where none is open on this rank.

        Raises:
            ConfigError: there is none of that name.
        """
        for one in self.open:
            if one.name == name:
                return one
        if self.open:
            names = ", ".join(one.name for one in self.open)
            raise ConfigError(f"there is no tracker '{name}'. Open are {names}.")
        return GeneralTracker(_blank=True)

    def close(self) -> None:
        """Write what is pending."""
        while self.open:
            self.open.pop().finish()


def on_main_process(function: Any) -> Any:
    """The method of a tracker on rank 0, unless it wants to be called on all ranks."""

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        here = current.placement().rank == 0 or not getattr(self, "main_process_only", True)
        return function(self, *args, **kwargs) if here else None

    return call


def _is_installed(logger: type[Logger]) -> bool:
    try:
        logger.check()
    except ConfigError:
        return False
    return True


__getattr__ = Table("accelerate.tracking").refusing(__name__)
