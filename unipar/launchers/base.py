"""Launchers: what each of them can do, and how one that another program starts is run."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel

from unipar.callbacks import Callback
from unipar.errors import ConfigError, WorkerError
from unipar.launch.rundir import RunDir
from unipar.launchers.following import follow
from unipar.launchers.handle import Handle
from unipar.launchers.task import Task
from unipar.strategy import Availability
from unipar.utils.devices import (
    DeviceChoice,
    DeviceRange,
    most_devices,
    resolve_device_type,
    resolve_num_devices,
)

log = logging.getLogger("unipar.launch")


class LauncherOptions(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Base of every launcher's typed options. Subclasses document each field."""

    launcher: ClassVar[str]
    """The launcher's registered name."""


class Launcher(ABC):
    """A system that starts processes. Importing one must not import its library.

    Attributes:
        options: its options.
    """

    options_type: ClassVar[type[LauncherOptions]]

    def __init__(self, options: LauncherOptions | None = None) -> None:
        self.options: Any = self.options_type() if options is None else options

    @property
    def name(self) -> str:
        """Its registered name."""
        return self.options_type.launcher

    @property
    def elsewhere(self) -> bool:
        """Whether its machines need not be like this one, so that nothing is told by this one."""
        return True

    @property
    def starts_here(self) -> bool:
        """Whether a run of one process may be this process."""
        return False

    @property
    def elastic(self) -> bool:
        """Whether it can change the number of a run's processes (``devices="2:8"``)."""
        return False

    @classmethod
    def availability(cls) -> Availability:
        """Whether it can be used from here; imports no more than it has to."""
        return Availability(True)

    def check(  # noqa: B027
        self, devices: int, num_nodes: int, device_type: str
    ) -> None:
        """Refuse what cannot be started, before anything is.

        Args:
            devices: processes on each node.
            num_nodes: number of machines.
            device_type: ``"cpu"``, ``"cuda"``, …

        Raises:
            ConfigError: it cannot be, with what to do.
        """

    def resolve_devices(
        self, device: DeviceChoice, devices: int | Literal["auto"], num_nodes: int
    ) -> tuple[str, int]:
        """The kind of device, and how many of them each node has.

        Args:
            device: what was asked for.
            devices: likewise.
            num_nodes: number of machines.

        Raises:
            ConfigError: the launcher cannot be used from here; this machine cannot tell, or has not
                as many; or :meth:`check` says so.
        """
        if isinstance(devices, str) and devices != "auto":
            raise ConfigError(f"devices={devices!r}: give a number, or 'auto'.")
        available = self.availability()
        if not available.ok:
            raise ConfigError(
                f"launcher '{self.name}' cannot be used here: {available.reason}. "
                f"{available.remedy}"
            )
        if self.elsewhere:
            given = {"device": device, "devices": devices}
            untold = [name for name, value in given.items() if value == "auto"]
            if untold:
                raise ConfigError(
                    f"launcher '{self.name}' runs on other machines, so this one cannot tell what "
                    f"'auto' is there: give {' and '.join(untold)}, such as device='cuda' and "
                    "devices=8 (on each node)."
                )
            device_type, number = device, devices
            assert isinstance(number, int)
        else:
            device_type = resolve_device_type(device)
            number = resolve_num_devices(devices, device_type)
        self.check(number, num_nodes, device_type)
        return device_type, number

    def resolve_range(
        self, device: DeviceChoice, devices: DeviceRange, num_nodes: int
    ) -> tuple[str, int]:
        """The kind of device, and how many a run begins with whose number of them may change.

        Raises:
            ConfigError: the launcher does not change it; this machine has too few.
        """
        if not self.elastic:
            raise ConfigError(
                f"devices='{devices}' is a range, and launcher '{self.name}' starts as many "
                f"processes as it is told. Give it a number, such as devices={devices.least} (the "
                "run goes on from its checkpoints on any other, with resume='auto'); or use "
                "launcher='local', or 'ray' on a running cluster, or start the script by torchrun "
                "--nnodes=MIN:MAX."
            )
        if num_nodes > 1:
            raise ConfigError(
                f"devices='{devices}' is of one machine, and num_nodes={num_nodes}. Start the "
                "script on each of them by torchrun --nnodes=MIN:MAX, and leave num_nodes out."
            )
        device_type = resolve_device_type(device)
        return device_type, most_devices(devices, device_type)

    def rendered(self, task: Task) -> str:
        """What would be given to the system, such as a batch script; empty where nothing is."""
        return ""

    def callbacks(self, directory: Path) -> Sequence[Callback]:
        """What the system learns of the run by, besides the user's own.

        Args:
            directory: the task's.
        """
        return ()

    @contextlib.contextmanager
    def directory(self, output_dir: Path) -> Iterator[Path]:
        """A task's directory for the length of the block: one of the run's own, which stays."""
        number = 0
        while True:
            directory = output_dir / "launch" / f"{number:03d}"
            try:
                directory.mkdir(parents=True)
            except FileExistsError:
                number += 1
                continue
            yield directory
            return

    @abstractmethod
    def run(self, task: Task) -> Any:
        """Start the processes of a task, show what rank 0 prints, and return what its call returns.

        Raises:
            ConfigError: they cannot be started.
            UniparError: a rank raised one; it is raised here as it is.
            WorkerError: a rank raised anything else, was killed, or stopped taking part.
            KeyboardInterrupt: the user interrupted the run, or left it to its system.
            Terminated: the same for SIGTERM and SIGHUP.
        """


class SubmittingLauncher(Launcher):
    """A launcher of which another program starts the processes; this one follows them."""

    @abstractmethod
    def start(self, task: Task) -> Handle:
        """Start the processes of a task, once.

        Raises:
            ConfigError: they cannot be started.
        """

    def run(self, task: Task) -> Any:
        while True:
            try:
                return self.once(task)
            except WorkerError as error:
                left = task.max_restarts - task.restart
                if left <= 0:
                    raise
                headline = str(error).splitlines()[0].rstrip(".")
                log.warning("%s. Restarting all ranks (%d restarts left).", headline, left - 1)
            task = dataclasses.replace(task, restart=task.restart + 1)

    def once(self, task: Task) -> Any:
        """Start the processes of a task and follow them; raises what :meth:`run` does."""
        handle, ended = None, True
        try:
            handle = self.start(task)
            # One that is left alone may have processes that are yet to begin.
            ended = not handle.outlives
            follow(handle, task)
            ended = True
            return handle.result()
        finally:
            if handle is not None:
                handle.close()
            if ended:
                # What every process has read; the dataset may be in it.
                RunDir(task.directory).payload.unlink(missing_ok=True)
