"""A run on Ray as the process sees it that has started it."""

# Ray is not in the environment in which types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import json
import logging
import re
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from unipar.errors import WorkerError
from unipar.launch.elastic import ranks
from unipar.launch.rank_names import name_ranks
from unipar.launch.rundir import fresh
from unipar.launchers.handle import Status
from unipar.launchers.shared import SharedHandle, SharedRun

log = logging.getLogger("unipar.launch")

# How long the cluster may leave the run without nodes until that is said, and how long Ray has to
# end what was canceled.
_PATIENCE, _CANCEL = 60.0, 10.0
# How long Ray's health checks may take until a node counts as lost.
_FOUND_OUT = 30.0


class RayHandle(SharedHandle):
    """One run of Ray Train, which a thread of this process waits for.

    Args:
        run: what is run, and its directory.
        needs: what the cluster must have room for, in words.
        trainer: Ray's own.
        held: what is given up when the run has ended: the connection to the cluster.
    """

    name = "the run on Ray"

    def __init__(
        self, run: SharedRun, needs: str, trainer: Any, held: contextlib.ExitStack
    ) -> None:
        self._run, self._task, self._needs = run, run.task, needs
        self._trainer, self._held = trainer, held
        self._failure: BaseException | None = None
        self._refused: BaseException | None = None
        self._asked_to_end = self._canceled = False
        self._said = ""
        self._since = time.monotonic()
        self._restarts, self._ended = 0, 0.0
        self._workers = 0
        self._nodes: set[str] = set()
        self._thread = threading.Thread(target=self._train, name="unipar-ray", daemon=True)
        self._thread.start()

    def _train(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as error:
            self._failure = error

    def status(self) -> Status:
        self._answer()
        if self._canceled:
            return Status.CANCELED
        if self._thread.is_alive():
            return Status.RUNNING if self._begun(0) else Status.WAITING
        return Status.SUCCEEDED if self._failure is None else Status.FAILED

    def interrupt(self, number: signal.Signals) -> None:
        saves = number == self._task.save_signal
        self._asked_to_end |= not saves
        if self._begun(0):
            self._run.interrupt(number)
        elif not saves:
            self.cancel()

    def cancel(self) -> None:
        self._canceled = True
        self._stop()
        self._thread.join(_CANCEL)
        # What Ray may yet start where it does not end here finds that it was canceled.

    def result(self) -> Any:
        if self._refused is not None:
            raise self._refused
        if self._canceled:
            raise KeyboardInterrupt
        return self._run.result(self._ending(), self._ended_ranks())

    def close(self) -> None:
        self._stop()
        self._held.close()
        self._thread.join(_CANCEL)

    # -- between what Ray starts -----------------------------------------------------------------

    def _begun(self, restart: int) -> bool:
        fresh(self._task.directory)
        return self._begin(restart).exists()

    def _begin(self, restart: int) -> Path:
        return self._task.directory / f"begin-{restart}"

    def _stop(self) -> None:
        (self._task.directory / "stop").touch()

    def _answer(self) -> None:
        """Let the group start again where Ray has decided on that, unless it is not to."""
        restart = self._run.task.restart
        if not self._begun(0):
            self._say_waiting("started the run", self._since)
            return
        if not self._workers:
            self._note_workers(0)
        if self._refused is not None or self._canceled:
            return
        if not self._begun(restart + 1):
            if self._thread.is_alive() and (self._endings() or self._run.has_failed()):
                self._ended = self._ended or time.monotonic()
                self._say_waiting("started the run again", self._ended)
            return
        self._said, newest = "", restart + 1
        while self._begun(newest + 1):
            # Ray has given up a start that had yet to be answered.
            newest += 1
        try:
            if self._asked_to_end:
                raise KeyboardInterrupt
            self._run.result(self._ending(), self._ended_ranks())
            raise WorkerError("Ray started the run again after it had ended.")
        except WorkerError as error:
            if self._may_be_lost(newest):
                return
            print(self._run.output.read(), end="", flush=True)
            self._again(error, newest)
        except BaseException as error:
            self._refuse(error)

    def _may_be_lost(self, restart: int) -> bool:
        """Whether a rank has gone without a word, and Ray may yet find out that its node has."""
        if not self._task.elastic or self._lost_nodes():
            return False
        if int(self._begin(restart).read_text()) != self._workers:
            return False
        told = self._run.attempt
        silent = [one for one in range(self._run.size) if not told.record(one).exists()]
        self._ended = self._ended or time.monotonic()
        return bool(silent) and time.monotonic() - self._ended < _FOUND_OUT

    def _again(self, error: WorkerError, restart: int) -> None:
        """Start once more after an error, on as many ranks as Ray has room for."""
        before, workers, lost = self._run.size, self._workers, self._lost_nodes()
        self._ended = 0.0
        self._note_workers(restart)
        task, headline = self._run.task, str(error).splitlines()[0].rstrip(".")
        if self._task.elastic and (self._workers != workers or lost):
            why = headline if lost or self._workers < workers else "the cluster has room for more"
            than = "as before" if task.size == before else f"not {before}"
            log.warning("The run goes on with %s, %s: %s.", ranks(task.size), than, why)
        else:
            left = self._task.max_restarts - self._restarts
            if self._task.elastic and left <= 0:
                self._refuse(error)
                return
            self._restarts += 1
            log.warning("%s. Restarting all ranks (%d restarts left).", headline, max(0, left - 1))
        again = replace(task, restart=restart)
        self._run = SharedRun(again, python=self._run.command[0])

    def _note_workers(self, restart: int) -> None:
        """Note what a start is on; where the number of ranks may change, the task says how many."""
        elastic = self._task.elastic
        if elastic is None:
            return
        self._nodes = _alive()
        self._workers = int(self._begin(restart).read_text())
        size = elastic.largest(self._workers)
        assert size is not None
        self._run.task = replace(self._run.task, devices=size)
        if spares := self._workers - size:
            log.warning(
                "%d of %d devices train. The strategy cannot be on more of them, so %s.",
                size,
                self._workers,
                "the other one is a spare" if spares == 1 else f"the other {spares} are spares",
            )

    def _lost_nodes(self) -> set[str]:
        return self._nodes - _alive() if self._task.elastic else set()

    def _refuse(self, error: BaseException) -> None:
        """End what Ray has started again: what is refused on purpose would be refused again."""
        self._refused = error
        self._stop()

    def _say_waiting(self, what: str, since: float) -> None:
        """Say once why nothing happens: Ray waits for room, for ever."""
        if self._said == what or time.monotonic() - since < _PATIENCE:
            return
        self._said = what
        log.warning(
            "Ray has not %s within %g s. It needs %s; maybe others use them (`ray status` shows "
            "that).",
            what,
            _PATIENCE,
            self._needs,
        )

    def _endings(self) -> list[Path]:
        restart = self._run.task.restart
        return sorted(self._task.directory.glob(f"ending-{restart}-*.txt"))

    def _ending(self) -> str:
        """How the newest start has ended, as its nodes say it, or else as Ray does."""
        told = [note.read_text() for note in self._endings()]
        told += [
            f"the node of {name_ranks(here)}, {host}, has left the cluster"
            for host, here in self._lost_places()
        ]
        return "; ".join(told) or str(self._failure or "Ray has ended it.").strip()

    def _lost_places(self) -> list[tuple[str, list[int]]]:
        """The hosts of the newest start that are lost, and which ranks were on each."""
        lost, restart = self._lost_nodes(), self._run.task.restart
        places = sorted(self._task.directory.glob(f"place-{restart}-*.json")) if lost else []
        found = [json.loads(place.read_text()) for place in places]
        return [(host, here) for node, host, here in found if node in lost and here]

    def _ended_ranks(self) -> set[int]:
        """The ranks of whose end the nodes of the newest start tell, or whose node is lost."""
        text = "\n".join(note.read_text() for note in self._endings())
        found = {int(rank) for rank in re.findall(r"^on .*?, rank (\d+) ", text, re.MULTILINE)}
        return found.union(*(here for _, here in self._lost_places()))


def _alive() -> set[str]:
    """The nodes of the cluster."""
    import ray

    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}
