"""What the way in which processes end says about their ranks."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest

from unipar.launch.blame import Kind
from unipar.launch.failure import cause, note, open_notes
from unipar.launch.group import WorkerGroup
from unipar.launch.rundir import Attempt
from unipar.utils import progress_marks


@pytest.fixture
def group(tmp_path):
    """Makes a group of processes that have run these shell commands to their end."""

    def make(*commands: str, timeout: float = 0.2) -> WorkerGroup:
        processes = {n: subprocess.Popen(["sh", "-c", line]) for n, line in enumerate(commands)}
        for process in processes.values():
            process.wait(20)
        return WorkerGroup(processes, Attempt(tmp_path), timeout, signal.SIGUSR2)

    return make


def test_status_0_is_a_failure_where_others_fail_by_it(group):
    one = group("exit 0", "exit 3")
    assert one.finished() == []
    found = {failure.rank: failure.title for failure in one.failures()}
    assert found == {
        0: "exited with status 0 without a Python error",
        1: "exited with status 3 without a Python error",
    }
    one.attempt.returned(0).touch()
    assert one.finished() == [0]
    assert [failure.rank for failure in one.failures()] == [1]


def test_status_0_alone_is_none(group):
    assert group("exit 0", "exit 0").failures() == []


def test_an_error_on_its_way_out_counts_once_another_rank_has_failed(group, monkeypatch):
    one = group("exit 0", "exit 0")
    monkeypatch.setattr("unipar.launch.failure._note", None)
    note(ValueError("nobody listens"))
    open_notes(one.attempt.note(1))
    note(ValueError("bad batch"))
    assert one.failures() == []
    two = group("exit 1", "exit 0")
    assert {failure.rank for failure in two.failures()} == {0, 1}
    assert "ValueError: bad batch" in [failure.title for failure in two.failures()]


ABORT = "kill -ABRT $$"


def test_a_rank_that_the_watchdog_of_nccl_ends_has_waited(group):
    one = group("true", ABORT, "kill -KILL $$")
    said = "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9141, …)"
    one.attempt.log(1).write_text(said)
    kinds = {failure.rank: failure.kind for failure in one.failures()}
    assert kinds[1] is Kind.TIMEOUT
    assert cause(one.failures()).rank == 2


def test_rank_0_prints_elsewhere_and_is_judged_by_its_mark(group, monkeypatch):
    monkeypatch.setattr(progress_marks, "_buffer", None)
    one = group(ABORT)
    progress_marks.open_marks(one.attempt.mark(0))
    progress_marks.mark(3, "backward")
    assert one.failures()[0].kind is Kind.ERROR, "it aborted right after its mark"
    time.sleep(0.3)
    # As if it had stood there for longer than the timeout.
    assert group(ABORT).failures()[0].kind is Kind.TIMEOUT
