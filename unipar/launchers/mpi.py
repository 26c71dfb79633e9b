"""``mpi``: processes of Open MPI's ``mpirun``, on this machine or on hosts that it reaches."""

from __future__ import annotations

import os
import shutil
import time
from typing import ClassVar

from pydantic import Field

from unipar.errors import ConfigError
from unipar.launchers.base import LauncherOptions, SubmittingLauncher
from unipar.launchers.command import CommandHandle, held
from unipar.launchers.handle import Status
from unipar.launchers.hosts import check_hosts
from unipar.launchers.shared import SharedRun
from unipar.launchers.task import Task

# Seconds from one look at what the ranks have left to the next.
_EVERY = 2.0


class MpiOptions(LauncherOptions, frozen=True):
    """Options of ``mpi``."""

    launcher: ClassVar[str] = "mpi"

    hosts: tuple[str, ...] = ()
    """The machines, in the order of their ranks; left out: this machine alone."""
    port: int = Field(29500, ge=1, le=65535)
    """A port of the first host, free there, on which the processes meet; of several hosts only."""
    mpirun: str = "mpirun"
    """The command, by name or path."""
    arguments: tuple[str, ...] = ()
    """More arguments of the command, such as `--mca`, `btl_tcp_if_include`, `eth0`."""
    python: str | None = None
    """The interpreter on the hosts; left out: this one's path."""


class MpiLauncher(SubmittingLauncher):
    """Starts one process for each device by ``mpirun``; unipar finds where each stands."""

    options_type = MpiOptions

    @property
    def elsewhere(self) -> bool:
        return bool(self.options.hosts)

    def check(self, devices: int, num_nodes: int, device_type: str) -> None:
        options = self.options
        if shutil.which(options.mpirun) is None:
            raise ConfigError(
                f"launcher 'mpi': there is no command '{options.mpirun}' on PATH. Install Open MPI "
                "(Debian: apt install openmpi-bin), or give its path: launcher='mpi:mpirun=/path'."
            )
        numeric = [host for host in options.hosts if ":" in host]
        if numeric:
            raise ConfigError(
                f"launcher 'mpi' has the host {numeric[0]}, and mpirun takes what follows a colon "
                "for a number of processes. Give a name that leads to that address."
            )
        check_hosts(self.name, options.hosts, devices, num_nodes, device_type)

    def command(self, task: Task, program: list[str]) -> list[str]:
        """What starts all processes of a task, each by ``program``."""
        options = self.options
        command = [options.mpirun, "-np", str(task.size), "--bind-to", "none"]
        if options.hosts:
            slots = ",".join(f"{host}:{task.devices}" for host in options.hosts)
            command += ["--host", slots, "--map-by", f"ppr:{task.devices}:node"]
            command += [
                "-x",
                f"MASTER_ADDR={options.hosts[0]}",
                "-x",
                f"MASTER_PORT={options.port}",
            ]
        else:
            command += ["--host", f"localhost:{task.devices}"]
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
        return [*command, *options.arguments, *program]

    def start(self, task: Task) -> CommandHandle:
        run = SharedRun(task, python=self.options.python)
        command = held(self.command(task, run.command))
        return MpirunHandle(command, run, name="mpirun")


class MpirunHandle(CommandHandle):
    """``mpirun``, ended where a rank has failed and it waits for a host that does not answer."""

    _failed = 0.0
    _look = 0.0

    def status(self) -> Status:
        status, now = super().status(), time.monotonic()
        if status is not Status.RUNNING or now < self._look:
            return status
        # The directory may be on a network's file system.
        self._look = now + _EVERY
        if not self._failed and self._run.has_failed():
            self._failed = now
        late = self._failed and now - self._failed > self._run.task.grace_period
        if not late or self._run.asked_to_end:
            return Status.RUNNING
        self.close()
        return Status.FAILED
