"""Running the commands of an installation: their output goes to a log, and none outlives it."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from unipar.errors import InstallError
from unipar.utils.subprocesses import end_group

_TAIL = 20
_ERROR = re.compile(r":\d+: (fatal )?error: |CMake Error")
"""How compilers and CMake begin what they complain of."""
_POLL = 0.2


@dataclass(frozen=True)
class Command:
    """One command line.

    Attributes:
        argv: program and arguments.
        environment: variables to set for it, beside this process's own.
        directory: where it runs; ``None`` is here.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    directory: Path | None = None

    def shell(self) -> str:
        """As one would type it."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        line = " ".join([*words, shlex.join(self.argv)])
        return line if self.directory is None else f"(cd {self.directory} && {line})"


def pip(*args: str, environment: Mapping[str, str] | None = None) -> Command:
    """This interpreter's pip."""
    argv = (sys.executable, "-m", "pip", "--disable-pip-version-check", *args)
    return Command(argv, environment or {})


class Runner:
    """Runs commands one after the other.

    Args:
        log: the file that their output is appended to.
        show: called a few times a second with the last line of it.
    """

    def __init__(self, log: Path, show: Callable[[str], None]) -> None:
        self.log, self._show = log, show

    def __call__(self, command: Command, *, timeout: float | None = None) -> None:
        """Run ``command`` to its end; the processes that it starts end with it.

        Raises:
            InstallError: it fails, cannot be started, or takes longer than ``timeout`` seconds.
        """
        with self.log.open("ab") as log:
            log.write(f"$ {command.shell()}\n".encode())
            log.flush()
            begin = log.tell()
            try:
                # A session of its own: Ctrl-C is this process's to handle, and what a compiler
                # driver has started can be ended with it.
                process = subprocess.Popen(
                    command.argv,
                    env={**os.environ, **command.environment},
                    cwd=command.directory,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise InstallError(f"cannot run {command.argv[0]}: {error}.") from error
            try:
                code = self._wait(process, begin, timeout)
            finally:
                end_group(process)
        if code is None:
            raise InstallError(self._failure(command, f"took longer than {timeout:g} s", begin))
        if code:
            raise InstallError(self._failure(command, f"exit code {code}", begin))

    def _wait(
        self, process: subprocess.Popen[bytes], begin: int, timeout: float | None
    ) -> int | None:
        waited = 0.0
        while timeout is None or waited < timeout:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_POLL)
            waited += _POLL
            lines = self._tail(begin, 1)
            if lines:
                self._show(lines[-1])
        return None

    def _tail(self, begin: int, count: int) -> list[str]:
        with self.log.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(begin, end - 200 * count - 2000))
            text = log.read().decode(errors="replace")
        return list(deque((line for line in text.splitlines() if line.strip()), maxlen=count))

    def _failure(self, command: Command, what: str, begin: int) -> str:
        shown = [f"    {line}" for line in self._tail(begin, _TAIL)]
        # A compiler's error comes long before the last words of what has called it.
        early = [line for line in self._errors(begin) if f"    {line}" not in shown]
        if early:
            shown = [*(f"    {line}" for line in early), "    …", *shown]
        text = "\n".join(shown) or "    (it printed nothing)"
        return (
            f"this command failed ({what}):\n  {command.shell()}\n{text}\nThe whole log: {self.log}"
        )

    def _errors(self, begin: int) -> list[str]:
        """The first lines that tell of an error, and the lines after the first of them."""
        with self.log.open("rb") as log:
            log.seek(begin)
            lines = log.read().decode(errors="replace").splitlines()
        first = next((at for at, line in enumerate(lines) if _ERROR.search(line)), None)
        return [] if first is None else [line for line in lines[first : first + 6] if line.strip()]
