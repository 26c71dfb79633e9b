"""Runs that a command of this machine starts, and that end with it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from unipar.errors import ConfigError
from unipar.launch.held import HELD
from unipar.launchers.handle import Status
from unipar.launchers.shared import LAST_LINES, SharedHandle, SharedRun
from unipar.utils.subprocesses import end_group

# It ends what it has started first, maybe on another machine.
_HELD = 10.0


def held(command: Sequence[str], python: str = sys.executable) -> list[str]:
    """A command that is ended, with all that it has started, when its standard input ends."""
    return [python, "-u", str(HELD), *command]


class CommandHandle(SharedHandle):
    """A command, its output in a file of the run's directory, and what its processes leave there.

    Args:
        command: what starts all processes of the run, with its arguments; it has to end when its
            standard input does (see :func:`held`).
        run: the run's directory.
        name: what messages call it.
        output: the name of the file that has what it prints.

    Raises:
        ConfigError: there is no such command.
    """

    def __init__(
        self,
        command: Sequence[str],
        run: SharedRun,
        *,
        name: str,
        output: str | None = None,
    ) -> None:
        self.name, self._run, self._canceled = name, run, False
        self._output = run.task.directory / (output or f"output-{run.task.restart}.log")
        try:
            with self._output.open("wb") as file:
                # Ctrl-C is passed on by us: such commands end their processes at once by it.
                self._process = subprocess.Popen(
                    command,
                    # By which it is held; see unipar/launch/held.py.
                    stdin=subprocess.PIPE,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
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

    def cancel(self) -> None:
        self._canceled = True
        self.close()

    def ending(self) -> str:
        """How it ended, with its last words."""
        code = self._process.wait()
        text = self._output.read_text(errors="replace").strip()
        last = "\n".join(["", *text.splitlines()[-LAST_LINES:]]) if text else ""
        return f"{self.name} exited with status {code}.{last}"

    def result(self) -> Any:
        return self._run.result(self.ending())

    def release(self) -> None:
        """Close its standard input, by which it begins to end."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def close(self) -> None:
        self.release()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_HELD)
        end_group(self._process)
