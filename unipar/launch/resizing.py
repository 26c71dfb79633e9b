"""The launching process's decisions on how many ranks an elastic run goes on with."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from unipar.launch.elastic import (
    Change,
    Elastic,
    Request,
    handed_over_at,
    ranks,
    take_request,
)
from unipar.launch.failure import Failure, cause
from unipar.launch.group import WorkerGroup
from unipar.launch.rank_names import name_ranks
from unipar.launch.rundir import RunDir

logger = logging.getLogger("unipar.launch")

_EVERY = 0.2
_POLL = 0.05
# What takes a rank away may take others a moment later.
_TOGETHER = 0.5


class Resizing:
    """Takes requests for another number of ranks, and says how many follow when some are lost.

    Args:
        elastic: what is allowed.
        run: the run's directory.
        patience: how long survivors may take to leave the state, in seconds.

    Attributes:
        too_few: why a run cannot go on after its last loss; empty if it can.
    """

    def __init__(self, elastic: Elastic, run: RunDir, patience: float) -> None:
        self.elastic, self._run, self._patience = elastic, run, patience
        self._devices = elastic.devices
        self._asked: int | None = None
        self._looked = 0.0
        self.too_few = ""
        size = elastic.largest(self._devices)
        self._say_spares(self._devices if size is None else size)

    def look(self, size: int) -> None:
        """Take a request, if there is one, and ask the ranks to hand over.

        Args:
            size: how many ranks there are.
        """
        now = time.monotonic()
        if now - self._looked < _EVERY:
            return
        self._looked = now
        if self._asked is not None and not self._run.resize.exists():
            logger.warning("The run stays on %s; it was to be on %d.", ranks(size), self._asked)
            self._asked = None
        request = self._request()
        if request is not None:
            self._decide(request, size)

    def _request(self) -> Request | None:
        """The request that there is, unless the run cannot be on as many, which it is told."""
        request = take_request(self.elastic.requests)
        if request is None or request.ranks in self.elastic.sizes:
            return request
        known = ", ".join(map(str, self.elastic.sizes))
        request.answer(
            f"The run cannot be on {ranks(request.ranks)}. It can be on {known}.", done=False
        )
        return None

    def _look_meanwhile(self) -> None:
        """Take a request where the ranks end already: it says how many follow."""
        request = self._request()
        if request is not None:
            self._asked = request.ranks
            request.answer(
                f"The run goes on with {ranks(request.ranks)}: those that it was on are ending."
            )

    def _decide(self, request: Request, size: int) -> None:
        if request.ranks == size:
            # What was asked for before, and has not begun, is not to be.
            self._asked = None
            self._run.resize.unlink(missing_ok=True)
            request.answer(f"The run is on {ranks(size)} already.")
        else:
            self._asked = request.ranks
            self._run.resize.touch()
            request.answer(
                f"The run goes on with {ranks(request.ranks)}, not {size}, after its next step."
            )

    def handed_over(self, group: WorkerGroup, restart: int) -> Change | None:
        """What comes of a group that has ended by itself: a change, or nothing more."""
        since = handed_over_at(group.attempt)
        if since is None:
            return None
        # What rank 0 has returned is no result of the run's.
        self._run.result.unlink(missing_ok=True)
        # A later request may have taken the first one back.
        self._devices = self._asked or group.size
        return self._change(group, self._devices, "", since, restart)

    def after_loss(
        self, group: WorkerGroup, failures: Sequence[Failure], restart: int
    ) -> Change | None:
        """What comes of a group that ranks are missing from; ``None``: the run ends, or restarts.

        Waits for survivors that hold the whole state to leave it.
        """
        self.too_few = ""
        first, complete = cause(list(failures)), handed_over_at(group.attempt)
        # How ranks end that have handed over is of no consequence.
        if first.rank not in group.killed(first.rank) and complete is None:
            return None
        time.sleep(_TOGETHER)
        lost = group.killed(first.rank)
        self._look_meanwhile()
        left = self._devices - len(lost)
        # What was asked for says how many devices there are, whatever was lost before.
        largest = self._asked or self.elastic.largest(left)
        if largest is None:
            self.too_few = (
                f"devices='{self.elastic.asked}': {left} are left, and the run needs "
                f"{self.elastic.sizes[0]} at least."
            )
            return None
        if complete is None and self.elastic.whole and len(lost) < group.size:
            group.attempt.lost.touch()
            self._await(group)
            if group.attempt.unsure.exists():
                why = group.attempt.unsure.read_text()
                logger.warning("The state in the ranks' memory is not taken: %s.", why)
        self._devices = self._asked or left
        title = first.title if len(lost) == 1 else first.title.replace("was ", "were ", 1)
        why = f"{name_ranks(lost)} {title}" if lost else ""
        since = complete or first.time
        return self._change(group, self._asked or largest, why, since, restart)

    def _await(self, group: WorkerGroup) -> None:
        """Wait until every rank has ended, or has an error on its way out: it has left its state.

        A rank that waits for one that is gone, and has not noticed, is given the grace period.
        """
        deadline = time.monotonic() + self._patience
        while time.monotonic() < deadline:
            if len({one.rank for one in group.failures()} | set(group.finished())) >= group.size:
                return
            self._look_meanwhile()
            time.sleep(_POLL)

    def _change(
        self, group: WorkerGroup, size: int, lost: str, since: float, restart: int
    ) -> Change:
        if self._asked is None:
            why = lost or "what was asked for was taken back"
        else:
            why = f"{lost}; {size} were asked for" if lost else "asked for"
        self._asked = None
        self._run.resize.unlink(missing_ok=True)
        change = Change(group.size, size, why, since)
        change.write(self._run.change(restart + 1))
        before = f"not {group.size}" if size != group.size else "as before"
        logger.warning("The run goes on with %s, %s: %s.", ranks(size), before, why)
        self._say_spares(size)
        return change

    def _say_spares(self, size: int) -> None:
        spares = self._devices - size
        if spares:
            logger.warning(
                "%d of %d devices train. The strategy cannot be on %s, so %s.",
                size,
                self._devices,
                " or ".join(map(str, range(size + 1, self._devices + 1))),
                "the other one is a spare" if spares == 1 else f"the other {spares} are spares",
            )
