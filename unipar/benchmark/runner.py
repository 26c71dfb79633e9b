"""Running the trials of a benchmark, one after the other, each in processes of its own."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unipar.benchmark.cells import Cell
from unipar.benchmark.environments import Environments
from unipar.benchmark.machine import cores
from unipar.benchmark.raw import loop_for
from unipar.benchmark.server import Server
from unipar.benchmark.store import Failure, Finding, Store, fresh
from unipar.benchmark.time_left import Outlook, Tally
from unipar.utils.subprocesses import end_group

_TAIL = 5


@dataclass
class Runner:
    """Runs trials, and remembers what is finished.

    Attributes:
        store: where trials leave what they find.
        environments: which Python runs which strategy.
        time_limit: seconds that one trial may take.
        raw: the directory of hand-written loops, if they are run.
        trace: whether the first repeat of each cell leaves Chrome traces.
        show: called with a cell and what is being done with it.
        tally: of the trials.
        look_ahead: called with how far it is before each trial, and after the last.
        failed: what became of the cells that have failed in this call.
    """

    store: Store
    environments: Environments
    time_limit: float
    raw: Path | None
    trace: bool
    show: Callable[[Cell, str], None]
    tally: Tally
    look_ahead: Callable[[Outlook], None]
    failed: dict[Cell, Failure] = field(default_factory=dict)
    _servers: dict[str, Server] = field(default_factory=dict)

    def rounds(self, cells: Sequence[Cell], repeats: int, seed: int) -> None:
        """Run every cell once a round, in a new order each round; what has failed is left out.

        In a fixed order each would always run after the same other one, and at the same distance
        from whatever the machine does meanwhile.
        """
        order = random.Random(seed)
        for repeat in range(repeats):
            for cell in order.sample(list(cells), len(cells)):
                self.trial(cell, repeat)
                if cell in self.failed:
                    self.tally.ended(self.store.trial(cell, later) for later in range(repeats))
        self.look_ahead(self.tally.outlook)

    def trial(self, cell: Cell, repeat: int) -> Finding | None:
        """One repeat of a cell, unless it has been run, or the cell has failed."""
        if cell in self.failed:
            return None
        traced = self.trace and repeat == 0 and not cell.raw
        found = self.store.finding(cell, repeat)
        if found is not None and not (traced and not self.store.traces(cell)):
            self.show(cell, "done before")
            return found
        self.show(cell, "running")
        python = self.environments.python_for(cell.strategy)
        if python is None:
            self._fail(
                cell,
                repeat,
                Failure(status="refused", reason=self.environments.reason_against(cell.strategy)),
            )
            return None
        request: dict[str, Any] = {
            "cell": cell.model_dump(),
            "repeat": repeat,
            "kind": "measure",
            "trace": traced,
        }
        if found is not None:
            fresh(self.store.trial(cell, repeat))
        if cell.raw:
            assert self.raw is not None
            request |= {"kind": "by hand", "loop": str(loop_for(cell.strategy, self.raw))}
        answer = self.ask(request, self.store.trial(cell, repeat), python, cell.devices)
        if isinstance(answer, Failure):
            self._fail(cell, repeat, answer)
            return None
        self.show(cell, "done")
        return Finding.model_validate(answer)

    def ask(
        self,
        request: dict[str, Any],
        directory: Path,
        python: str = sys.executable,
        devices: int = 1,
    ) -> dict[str, Any] | Failure:
        """Have a process answer a request, or take the answer that it has left before."""
        file = directory / "answer.json"
        if file.exists():
            return json.loads(file.read_text())
        self.look_ahead(self.tally.outlook)
        began = time.time()
        fresh(directory)
        (directory / "request.json").write_text(json.dumps({**request, "began": began}))
        log = directory / "log.txt"
        # The ranks get as many by the launcher; a single process would take what it inherits.
        threads = max(1, cores() // devices)
        with log.open("wb") as output:
            try:
                trial = self._server(python).start(
                    self.store.job,
                    directory,
                    processes=devices,
                    threads=threads,
                    log=output.fileno(),
                )
            except RuntimeError as error:
                self._servers.pop(python).close()
                reason = f"{python} has ended:\n{error}"
                return Failure(status="failed", reason=reason, environment=python)
            try:
                code = trial.wait(self.time_limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end_group(trial)
        self.tally.ended([directory], time.time() - began)
        if file.exists():
            return json.loads(file.read_text())
        if code is None:
            reason = f"it was ended after {self.time_limit:g} s, the time limit of a trial."
            return Failure(status="time limit", reason=reason, environment=python)
        with contextlib.suppress(OSError):
            return Failure.model_validate_json((directory / "failure.json").read_text())
        return _crash(code, log, python)

    def _server(self, python: str) -> Server:
        if python not in self._servers:
            self._servers[python] = Server(python)
        return self._servers[python]

    def close(self) -> None:
        """End what is kept ready for the next trial."""
        while self._servers:
            self._servers.popitem()[1].close()

    def _fail(self, cell: Cell, repeat: int, failure: Failure) -> None:
        self.failed[cell] = failure
        directory = self.store.trial(cell, repeat)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "failure.json").write_text(failure.model_dump_json(indent=1))
        self.show(cell, failure.status)


def _crash(code: int, log: Path, python: str) -> Failure:
    """Describe a process that has ended without a word."""
    last = deque(
        (line for line in log.read_text(errors="replace").splitlines() if line.strip()), _TAIL
    )
    if code < 0:
        how = f"its process was killed by signal {-code}"
        how += ", as the system does when memory runs out." if code == -9 else "."
    else:
        how = f"its process ended with exit code {code}."
    said = "\n".join(f"    {line}" for line in last)
    reason = f"{how}\n{said}\nThe whole output: {log}" if said else how
    return Failure(status="failed", reason=reason, environment=python)
