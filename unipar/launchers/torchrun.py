"""``torchrun``: torch's own elastic launcher, on this machine or on hosts that ssh reaches."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from unipar.errors import ConfigError
from unipar.launch.node import NODE
from unipar.launchers.base import LauncherOptions, SubmittingLauncher
from unipar.launchers.command import CommandHandle, held
from unipar.launchers.handle import Status
from unipar.launchers.hosts import check_hosts
from unipar.launchers.shared import SharedHandle, SharedRun
from unipar.launchers.task import Task


class TorchrunOptions(LauncherOptions, frozen=True):
    """Options of ``torchrun``."""

    launcher: ClassVar[str] = "torchrun"

    hosts: tuple[str, ...] = ()
    """The machines, in the order of their ranks, as ssh knows them; the others reach the first by
    the same name (without `user@`). Left out: this machine alone."""
    port: int | None = Field(None, ge=1, le=65535)
    """A port of the first host, free there, on which the processes meet; left out: one that the
    first host finds free."""
    ssh: str = "ssh -o BatchMode=yes -o ServerAliveInterval=15"
    """The command that runs another on a host: it is called with the host and a line for the
    host's shell, and passes its standard input on."""
    python: str | None = None
    """The interpreter on the hosts; left out: this one's path."""
    environ: dict[str, str] = Field(default_factory=dict)
    """Variables of the processes, such as `NCCL_DEBUG`; those that a host has set itself stay."""


class TorchrunLauncher(SubmittingLauncher):
    """Starts torch's elastic launcher once on each node."""

    options_type = TorchrunOptions

    @property
    def elsewhere(self) -> bool:
        return bool(self.options.hosts)

    def check(self, devices: int, num_nodes: int, device_type: str) -> None:
        options = self.options
        check_hosts(self.name, options.hosts, devices, num_nodes, device_type)
        words = shlex.split(options.ssh)
        if options.hosts and (not words or shutil.which(words[0]) is None):
            raise ConfigError(
                f"launcher 'torchrun': ssh={options.ssh!r}, and there is no such command on PATH. "
                "Install OpenSSH's client (Debian: apt install openssh-client), or name another "
                "command that is called like it."
            )

    def commands(self, task: Task) -> list[list[str]]:
        """What starts the processes of a task, one command for each node."""
        options = self.options
        first = options.hosts[0].rpartition("@")[2] if options.hosts else "127.0.0.1"
        commands = []
        for node in range(task.num_nodes):
            given = {
                "node": node,
                "nodes": task.num_nodes,
                "devices": task.devices,
                "address": first,
                "port": options.port,
                "timeout": math.ceil(task.timeout),
                "restart": task.restart,
            }
            python = options.python or sys.executable
            node_command = [python, "-u", str(NODE), str(task.directory), json.dumps(given)]
            command = held(node_command, python)
            if options.hosts:
                command = [*shlex.split(options.ssh), options.hosts[node], shlex.join(command)]
            commands.append(command)
        return commands

    def start(self, task: Task) -> NodesHandle:
        run = SharedRun(task, python=self.options.python, environ=self.options.environ)
        return NodesHandle(self.commands(task), self.options.hosts or ("this machine",), run)


class NodesHandle(SharedHandle):
    """One command for each node; where one fails, the others are ended.

    Args:
        commands: what starts each node's processes.
        hosts: the nodes' names.
        run: the run's directory.
    """

    name = "torchrun"

    def __init__(
        self, commands: Sequence[Sequence[str]], hosts: Sequence[str], run: SharedRun
    ) -> None:
        self._run, self._nodes = run, list[CommandHandle]()
        self._failed: list[int] = []
        self._noticed = 0.0
        self._canceled = False
        try:
            for node, (command, host) in enumerate(zip(commands, hosts, strict=True)):
                output = f"output-{run.task.restart}-{node}.log"
                name = f"torchrun on {host}"
                self._nodes.append(CommandHandle(command, run, name=name, output=output))
        except ConfigError:
            self.close()
            raise

    def status(self) -> Status:
        states = [node.status() for node in self._nodes]
        if self._canceled:
            return Status.CANCELED
        for node, state in enumerate(states):
            if state is Status.FAILED and node not in self._failed:
                self._failed.append(node)
                self._noticed = self._noticed or time.monotonic()
        if all(state.ended for state in states):
            return Status.FAILED if self._failed else Status.SUCCEEDED
        # The other ranks find out by themselves, and leave word of it; one that is stuck does not.
        late = time.monotonic() - self._noticed > self._run.task.grace_period
        if self._failed and late and not self._run.asked_to_end:
            self.close()
            return Status.FAILED
        return Status.RUNNING

    def cancel(self) -> None:
        self._canceled = True
        self.close()

    def result(self) -> Any:
        endings = [self._nodes[node].ending() for node in self._failed]
        devices = self._run.task.devices
        ranks = [rank for rank in range(self._run.size) if rank // devices in self._failed]
        return self._run.result("\n".join(endings) or "all nodes have ended.", ranks)

    def close(self) -> None:
        # All of them at once: each may take a moment.
        for node in self._nodes:
            node.release()
        for node in self._nodes:
            node.close()
