"""``local``: processes of this machine, started and watched by this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unipar import launch
from unipar.launchers.base import Launcher, LauncherOptions
from unipar.launchers.task import Task
from unipar.utils.scratch import scratch


class LocalOptions(LauncherOptions, frozen=True):
    """There are none."""

    launcher = "local"


class LocalLauncher(Launcher):
    """Starts processes by torch's elastic agent, in this process; see :func:`unipar.launch.run`."""

    options_type = LocalOptions

    @property
    def elsewhere(self) -> bool:
        return False

    @property
    def elastic(self) -> bool:
        return True

    @property
    def starts_here(self) -> bool:
        return True

    def check(self, devices: int, num_nodes: int, device_type: str) -> None:
        launch.check(devices, num_nodes, device_type)

    @contextlib.contextmanager
    def directory(self, output_dir: Path) -> Iterator[Path]:
        with scratch() as directory:
            yield directory

    def run(self, task: Task) -> Any:
        return launch.run(
            task.fn,
            devices=task.devices,
            num_nodes=task.num_nodes,
            device_type=task.device_type,
            timeout=task.timeout,
            max_restarts=task.max_restarts,
            grace_period=task.grace_period,
            save_signal=task.save_signal,
            directory=task.directory,
            elastic=task.elastic,
        )
