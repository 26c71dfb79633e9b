"""Runs that a command of this machine starts, and that end with it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from unipar.errors import ConfigError
from unipar.launchers.handle import Handle, Status
from unipar.launchers.shared import SharedRun
from unipar.utils.subprocesses import end_group

_LAST_LINES = 15


class CommandHandle(Handle):
    """A command, its output in a file of the run's directory, and what its processes leave there.

    Args:
        command: what starts all processes of the run, with its arguments.
        run: the run's directory.
        name: what messages call it.
        environ: variables that it gets besides this process's own.

    Raises:
        ConfigError: there is no such command.
    """

    def __init__(
        self,
        command: Sequence[str],
        run: SharedRun,
        *,
        name: str,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self._run, self._canceled = name, run, False
        self._output = run.task.directory / f"output-{run.task.restart}.log"
        try:
            with self._output.open("wb") as file:
                # Ctrl-C is passed on by us: such commands end their processes at once by it.
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={**os.environ, **(environ or {})},
                )
        except OSError as error:
            raise ConfigError(f"{command[0]} cannot be started: {error}.") from error

    def status(self) -> Status:
        code = self._process.poll()
        if code is None:
            return Status.RUNNING
        if self._canceled:
            return Status.CANCELED
        return Status.FAILED if code else Status.SUCCEEDED

    def output(self) -> str:
        return self._run.output.read()

    def interrupt(self, number: signal.Signals) -> None:
        self._run.interrupt(number)

    def cancel(self) -> None:
        self._canceled = True
        end_group(self._process)

    def result(self) -> Any:
        code = self._process.wait()
        text = self._output.read_text(errors="replace").strip()
        last = "\n".join(["", *text.splitlines()[-_LAST_LINES:]]) if text else ""
        return self._run.result(f"{self.name} exited with status {code}.{last}")

    def close(self) -> None:
        end_group(self._process)
