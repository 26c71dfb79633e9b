"""torch's elastic agent, with this library's way to start, watch and stop workers."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SubprocessContext

from unipar.errors import Terminated, UniparError, WorkerError
from unipar.launch import report
from unipar.launch.blame import Kind
from unipar.launch.elastic import Change
from unipar.launch.failure import Failure, cause
from unipar.launch.forked import taken
from unipar.launch.group import WorkerGroup
from unipar.launch.resizing import Resizing
from unipar.launch.rundir import RunDir
from unipar.utils.signals import TERMINATIONS, Request

logger = logging.getLogger("unipar.launch")

_POLL = 0.05
# A rank that lost its connection may be seen to fail before the rank that it lost.
_SETTLE = 3.0
# The failed rank's own exit handlers (metrics writers, open files).
_LAST_WORDS = 2.0
_SHUTDOWN = 3
# After Ctrl-C, until all ranks end; and after any signal, until the rest end once one has failed.
_INTERRUPT_GRACE = 600.0
_INTERRUPT_REST = 30.0
# The ranks keep the grace period themselves, and say what was saved; this is for one that cannot.
_GRACE_MARGIN = 10.0


class WorkerLogs(LogsSpecs):
    """Rank 0 writes to the terminal itself; the others to a file each."""

    def __init__(self, run: RunDir) -> None:
        super().__init__(log_dir=str(run.root))
        self._run = run

    @property
    def root_log_dir(self) -> str:
        return str(self._run.root)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        attempt = self._run.attempt(int(envs[0]["TORCHELASTIC_RESTART_COUNT"]))
        attempt.directory.mkdir()
        ranks = range(len(envs))
        # Stdout joins stderr in the worker: two descriptors of one file would overwrite each other.
        return LogsDest(
            stdouts={rank: os.devnull if rank else "" for rank in ranks},
            stderrs={rank: str(attempt.log(rank)) if rank else "" for rank in ranks},
            error_files={rank: str(attempt.directory / "unused") for rank in ranks},
        )


class Agent(LocalElasticAgent):
    """Starts, restarts and ends the group; decides which rank's failure is the cause.

    Attributes:
        failure: the error of the last attempt that failed.
        stopped_by: the signal that ends the run, or 0.
    """

    def __init__(
        self,
        spec: api.WorkerSpec,
        run: RunDir,
        *,
        timeout: float,
        grace_period: float,
        stack_signal: signal.Signals,
        resizing: Resizing | None = None,
    ) -> None:
        super().__init__(spec, WorkerLogs(run), exit_barrier_timeout=_SHUTDOWN)
        self._run_dir = run
        self._timeout = timeout
        self._attempts: list[WorkerGroup] = []
        self._grace, self._stack_signal = grace_period, stack_signal
        self._resizing = resizing
        self._request = Request()
        self._stopped_at = 0.0
        self._at_once = False
        self.failure: UniparError | None = None
        self.stopped_by = 0

    def stop(self, number: signal.Signals) -> None:
        """Ask the workers to stop; a second call makes them. Safe in a signal handler."""
        insists = self._request.insists(number)
        if insists:
            self._at_once = True
        elif insists is False:
            self.stopped_by, self._stopped_at = number, time.monotonic()
            self.pass_on(number)

    def pass_on(self, number: signal.Signals) -> None:
        """Pass a signal on to the workers. Safe in a signal handler."""
        if self._attempts:
            self._attempts[-1].signal(number)

    def close(self) -> None:
        """End whatever the workers of any attempt have left running, and close the port."""
        for group in self._attempts:
            group.sweep()
        # A store closes with its last reference, and an error's traceback would keep this one.
        self._store = self._worker_group.store = None

    # -- what torch's agent calls ----------------------------------------------------------------
    # torch 2.13, distributed/elastic/agent/server/local_elastic_agent.py. Its ``prof`` decorator
    # hides the signatures of the methods that it wraps from checkers.

    def _start_workers(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, worker_group: api.WorkerGroup
    ) -> dict[int, Any]:
        restart = len(self._attempts)
        with taken(), _handlers_kept():
            pids = super()._start_workers(worker_group)  # pyright: ignore[reportCallIssue]
        context = self._pcontext
        assert isinstance(context, SubprocessContext)
        processes = {rank: handler.proc for rank, handler in context.subprocess_handlers.items()}
        attempt = self._run_dir.attempt(restart)
        self._attempts.append(WorkerGroup(processes, attempt, self._timeout, self._stack_signal))
        if self.stopped_by:
            self.pass_on(signal.Signals(self.stopped_by))
        return pids

    def _monitor_workers(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, worker_group: api.WorkerGroup
    ) -> api.RunResult:
        group = self._attempts[-1]
        if self.stopped_by:
            self._await_stopped(group)
            if self.stopped_by == signal.SIGINT:
                raise KeyboardInterrupt
            raise Terminated(self.stopped_by)
        resizing, restart = self._resizing, len(self._attempts) - 1
        if resizing is not None:
            resizing.look(group.size)
        if not group.failures():
            if group.running():
                # Torch's own look ends all others where one has failed since, and they may hold the
                # state of the run (torch 2.13, distributed/elastic/multiprocessing/api.py, _poll).
                return api.RunResult(state=api.WorkerState.HEALTHY)
            result = super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue]
            # A worker that has failed between the two looks is explained like any other.
            if not result.is_failed():
                ended = result.state == api.WorkerState.SUCCEEDED
                change = resizing.handed_over(group, restart) if resizing and ended else None
                return result if change is None else self._regroup(worker_group, change)
        failures = self._settle(group)
        if not self.stopped_by and (ended_by := cause(failures).signal):
            # It came to a rank alone, and the ranks have agreed on it, or will lose that one.
            if not cause(failures).traceback:
                logger.warning(report.ended(group, cause(failures)))
            self.stopped_by, self._stopped_at = ended_by, time.monotonic()
        if self.stopped_by:
            return self._monitor_workers(worker_group)
        change = None
        if resizing is not None:
            change = resizing.after_loss(group, failures, restart)
        if self.stopped_by:
            return self._monitor_workers(worker_group)
        if change is not None:
            return self._regroup(worker_group, change)
        self.failure = self._explain(group, failures)
        if resizing is not None and resizing.too_few:
            self.failure.args = (f"{self.failure}\n{resizing.too_few}",)
        self._shutdown()
        if not isinstance(self.failure, WorkerError):
            # What the library refuses on purpose, it would refuse again.
            raise self.failure
        left = worker_group.spec.max_restarts - len(self._attempts) + 1
        if left > 0:
            headline = str(self.failure).splitlines()[0].rstrip(".")
            logger.warning("%s. Restarting all ranks (%d restarts left).", headline, left - 1)
        return api.RunResult(state=api.WorkerState.FAILED)

    def _regroup(self, worker_group: api.WorkerGroup, change: Change) -> api.RunResult:
        """Start all ranks again, as many as a change says, which takes none of the restarts."""
        spec = worker_group.spec
        spec.local_world_size = change.after
        # Torch counts starts by what is left of it.
        spec.max_restarts += 1
        self._restart_workers(worker_group)  # pyright: ignore[reportCallIssue]
        return api.RunResult(state=api.WorkerState.HEALTHY)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        # Workers take SIGTERM as a reason to finish their step, and here none is to be finished.
        # Torch's own takes a timeout only in some versions, and SIGKILL needs none.
        super()._shutdown(signal.SIGKILL)
        for group in self._attempts:
            group.sweep()

    # -- telling what happened -------------------------------------------------------------------

    def _settle(self, group: WorkerGroup) -> list[Failure]:
        """The failures once the cause is among them, or no more can be expected."""
        deadline = time.monotonic() + _SETTLE
        last_words = time.monotonic() + _LAST_WORDS
        while True:
            failures = group.failures()
            now = time.monotonic()
            first = cause(failures)
            heard = len(failures) + len(group.finished()) >= group.size
            if not first.kind.is_echo:
                if first.rank not in group.running() or now > last_words:
                    return failures
            elif heard or now > deadline:
                return failures
            if self.stopped_by:
                return failures
            time.sleep(_POLL)

    def _explain(self, group: WorkerGroup, failures: list[Failure]) -> UniparError:
        first = cause(failures)
        if first.kind.is_echo:
            failed = {failure.rank for failure in failures}
            missing = [rank for rank in group.running() if rank not in failed]
            if missing and first.kind is not Kind.APART:
                error = report.hung(group, failures, missing)
                # What they did has been said, and a stopped process would not end when asked to.
                group.kill(missing)
                return error
            if not group.finished():
                return report.apart(group, failures)
        if first.error is not None:
            return first.error
        return report.failed(group, first)

    def _await_stopped(self, group: WorkerGroup) -> None:
        """Let the workers end by themselves after a signal, within reason.

        Raises:
            UniparError: one of the library's own errors on the way out, such as a checkpoint
                that could not be written.
        """
        first_failed = None
        grace = _INTERRUPT_GRACE
        if self.stopped_by != signal.SIGINT:
            grace = self._grace + _GRACE_MARGIN
        while group.running() and not self._at_once:
            now = time.monotonic()
            if first_failed is None and group.failures():
                first_failed = now
            if now - self._stopped_at > grace:
                logger.warning("The ranks have not ended within %g s and are killed.", grace)
                break
            if first_failed is not None and now - first_failed > _INTERRUPT_REST:
                break
            time.sleep(_POLL)
        errors = [failure for failure in group.failures() if failure.error is not None]
        self._shutdown()
        if errors and not self._at_once:
            error = cause(errors).error
            assert error is not None
            raise error


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Put back the handlers of signals that torch's agent has taken over meanwhile.

    Torch 2.8, distributed/elastic/multiprocessing/api.py, PContext.start: it takes all four,
    where newer ones take those that ``TORCHELASTIC_SIGNALS_TO_HANDLE`` names.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *TERMINATIONS)}
    if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
        before[signal.SIGQUIT] = signal.SIG_IGN
    yield
    if threading.current_thread() is threading.main_thread():
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)
