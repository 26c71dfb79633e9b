"""Following what was started: its output, signals on their way to it, restarts."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from unipar.errors import Terminated, WorkerError
from unipar.launchers import Handle, LauncherOptions, Status, SubmittingLauncher, Task, following


class Stub(Handle):
    """A run of so many looks, which ends earlier when it is asked to."""

    name = "stub 7"
    poll: ClassVar[float] = 0.01

    def __init__(self, looks: int, *, heeds: bool = True, error: Exception | None = None) -> None:
        self.looks, self.heeds, self.error = looks, heeds, error
        self.heard: list[signal.Signals] = []
        self.canceled = self.closed = False

    def status(self) -> Status:
        self.looks -= 1
        if self.canceled:
            return Status.CANCELED
        return Status.RUNNING if self.looks > 0 else Status.SUCCEEDED

    def output(self) -> str:
        return f"{self.looks} "

    def interrupt(self, number: signal.Signals) -> None:
        self.heard.append(number)
        if self.heeds and number != signal.SIGUSR1:
            self.looks = 2

    def cancel(self) -> None:
        self.canceled = True

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        return "done"

    def close(self) -> None:
        self.closed = True


class Outliving(Stub):
    outlives: ClassVar[bool] = True


def task(directory: Path, **more: Any) -> Task:
    return Task(
        fn=lambda placement: None,
        devices=1,
        num_nodes=1,
        device_type="cpu",
        timeout=60.0,
        max_restarts=more.pop("max_restarts", 0),
        grace_period=more.pop("grace_period", 25.0),
        save_signal=signal.SIGUSR1,
        directory=directory,
    )


class Options(LauncherOptions, frozen=True):
    launcher: ClassVar[str] = "stub"


class Stubs(SubmittingLauncher):
    options_type = Options

    def __init__(self, *handles: Stub) -> None:
        super().__init__()
        self.handles, self.started = list(handles), list[Task]()

    def start(self, task: Task) -> Handle:
        self.started.append(task)
        return self.handles[len(self.started) - 1]


def soon(*numbers: signal.Signals, every: float = 0.1) -> None:
    def send() -> None:
        for number in numbers:
            time.sleep(every)
            os.kill(os.getpid(), number)

    threading.Thread(target=send).start()


def test_what_is_printed_last_is_shown(tmp_path: Path, capsys: Any) -> None:
    handle = Stub(3)
    assert Stubs(handle).run(task(tmp_path)) == "done"
    assert capsys.readouterr().out == "2 1 0 "
    assert handle.closed


@pytest.mark.parametrize(
    ("number", "ending"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)]
)
def test_a_signal_is_passed_on_and_waited_for(number: Any, ending: Any, tmp_path: Path) -> None:
    handle, before = Stub(10**6), signal.getsignal(number)
    soon(number)
    with pytest.raises(ending):
        Stubs(handle).run(task(tmp_path))
    assert handle.heard == [number]
    assert not handle.canceled
    assert handle.closed
    assert signal.getsignal(number) is before


def test_a_second_ctrl_c_ends_it(tmp_path: Path) -> None:
    handle = Stub(10**6, heeds=False)
    soon(signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        Stubs(handle).run(task(tmp_path))
    assert handle.heard == [signal.SIGINT]
    assert handle.canceled


def test_what_does_not_end_in_time_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_GRACE_MARGIN", 0.1)
    handle = Stub(10**6, heeds=False)
    soon(signal.SIGTERM)
    with pytest.raises(Terminated):
        Stubs(handle).run(task(tmp_path, grace_period=0.1))
    assert handle.canceled


def test_the_save_signal_is_passed_on_and_changes_nothing(tmp_path: Path) -> None:
    handle = Stub(40)
    soon(signal.SIGUSR1)
    assert Stubs(handle).run(task(tmp_path)) == "done"
    assert handle.heard == [signal.SIGUSR1]


def test_an_error_on_the_way_out_is_seen(tmp_path: Path) -> None:
    from unipar.errors import CheckpointError

    soon(signal.SIGINT)
    with pytest.raises(CheckpointError, match="disk"):
        Stubs(Stub(10**6, error=CheckpointError("disk full"))).run(task(tmp_path))


@pytest.mark.parametrize(("answer", "canceled"), [("y", True), ("", False), (None, False)])
def test_what_goes_on_by_itself_is_canceled_only_when_one_says_so(
    answer: str | None, canceled: bool, tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    asked: list[str] = []

    def ask(question: str) -> str:
        asked.append(question)
        assert answer is not None
        return answer

    class Terminal:
        def isatty(self) -> bool:
            return answer is not None

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", ask)
    handle = Outliving(10**6)
    soon(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        Stubs(handle).run(task(tmp_path))
    assert handle.canceled is canceled
    assert handle.heard == []
    assert asked == ([] if answer is None else ["\nCancel stub 7? [y/N] "])
    assert ("stub 7 goes on without this process" in caplog.text) is not canceled


def test_a_run_that_failed_starts_again_as_often_as_allowed(tmp_path: Path, caplog: Any) -> None:
    lost = WorkerError("Rank 1 was lost\nmore")
    launcher = Stubs(Stub(1, error=lost), Stub(1, error=lost), Stub(1))
    assert launcher.run(task(tmp_path, max_restarts=2)) == "done"
    assert [one.restart for one in launcher.started] == [0, 1, 2]
    assert "Rank 1 was lost. Restarting all ranks (1 restarts left)." in caplog.text
    launcher = Stubs(Stub(1, error=lost), Stub(1, error=lost))
    with pytest.raises(WorkerError, match="Rank 1 was lost"):
        launcher.run(task(tmp_path, max_restarts=1))


def test_what_processes_have_read_is_removed_where_none_is_left(tmp_path: Path) -> None:
    payload = tmp_path / "payload.pkl"
    for handle in (Stub(1), Stub(1, error=WorkerError("lost"))):
        payload.touch()
        with contextlib.suppress(WorkerError):
            Stubs(handle).run(task(tmp_path))
        assert not payload.exists()
    payload.touch()
    soon(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        Stubs(Outliving(10**6)).run(task(tmp_path))
    assert payload.exists()
