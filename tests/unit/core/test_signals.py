"""Signals: the first asks, the second ends, none is lost, and what is not ours is left alone."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from unipar.errors import Terminated
from unipar.train.interrupt import Signals
from unipar.utils import signals
from unipar.world import Flag, Placement, World

STOPPING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
END = (KeyboardInterrupt, Terminated)


@pytest.fixture(autouse=True)
def hangups_end() -> Iterator[None]:
    """Under nohup a process ignores them, and so would the run."""
    with handler(signal.SIGHUP, signal.SIG_DFL):
        yield


@contextlib.contextmanager
def training(world: World | None = None, **options: Any) -> Iterator[Signals]:
    signals = Signals(**options)
    with signals.handled(), signals.training(world or World(Placement())):
        signals.begin_step()
        yield signals


@contextlib.contextmanager
def handler(number: int, function: Any) -> Iterator[None]:
    before = signal.signal(number, function)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", STOPPING)
def test_the_first_asks_for_the_end_of_the_step(number: signal.Signals):
    world = World(Placement())
    obeyed = []

    def stop_when_asked() -> None:
        with training(world) as signals:
            signal.raise_signal(number)
            obeyed.append((world.take_flag(Flag.INTERRUPT), signals.stopped_by))
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        stop_when_asked()
    assert obeyed == [(True, number)]


@pytest.mark.parametrize("number", STOPPING)
def test_the_second_ends_at_once(number: signal.Signals, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(signals, "_REPEAT", 0.0)
    reached = []

    def ask_twice() -> None:
        with training():
            signal.raise_signal(number)
            reached.append(1)
            signal.raise_signal(number)
            reached.append(2)

    with pytest.raises(END):
        ask_twice()
    assert reached == [1]


def test_a_command_that_cleans_up_after_termination_leaves_the_steps_to_the_run():
    world = World(Placement())
    reached = []

    def train() -> None:
        with signals.terminations_raised(), training(world):
            signal.raise_signal(signal.SIGTERM)
            reached.append("saved")

    with pytest.raises(Terminated):
        train()
    assert reached == ["saved"]
    with pytest.raises(Terminated), signals.terminations_raised():
        signal.raise_signal(signal.SIGTERM)


def test_what_a_launcher_passes_on_beside_its_scheduler_is_the_same_request():
    reached = []

    def ask_twice() -> None:
        with training():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            reached.append("saved")

    with pytest.raises(Terminated):
        ask_twice()
    assert reached == ["saved"]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, None), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_before_the_first_step_there_is_nothing_to_finish(number: signal.Signals, code: Any):
    reached = []

    def prepare() -> None:
        signals = Signals()
        with signals.handled(), signals.training(World(Placement())):
            signal.raise_signal(number)
            reached.append("trained")

    with pytest.raises(END) as caught:
        prepare()
    assert getattr(caught.value, "code", None) == code
    assert reached == []


@pytest.mark.parametrize("number", STOPPING)
def test_code_that_catches_everything_before_the_first_step_does_not_hide_it(
    number: signal.Signals,
):
    reached = []

    def prepare() -> None:
        signals = Signals()
        with signals.handled(), signals.training(World(Placement())):
            with contextlib.suppress(BaseException):
                signal.raise_signal(number)
            reached.append("prepared")
            signals.begin_step()
            reached.append("trained")

    with pytest.raises(END):
        prepare()
    assert reached == ["prepared"]


@pytest.mark.parametrize("number", STOPPING)
def test_one_that_comes_too_late_for_a_step_counts_at_the_end(number: signal.Signals):
    reached = []

    def finish() -> None:
        with training():
            signal.raise_signal(number)
            reached.append("saved")

    with pytest.raises(END):
        finish()
    assert reached == ["saved"]


def test_the_applications_own_handler_of_ctrl_c_is_put_back_and_called():
    calls: list[int] = []
    with handler(signal.SIGINT, lambda number, frame: calls.append(number)):
        with training():
            signal.raise_signal(signal.SIGINT)
            assert calls == []
        assert calls == [signal.SIGINT]
        signal.raise_signal(signal.SIGINT)
        assert len(calls) == 2


def test_a_handler_of_the_applications_own_for_termination_stays():
    calls: list[int] = []
    own = handler(signal.SIGTERM, lambda number, frame: calls.append(number))
    with own, training() as signals:
        signal.raise_signal(signal.SIGTERM)
        assert calls == [signal.SIGTERM]
        assert not signals.stopped_by


@pytest.mark.parametrize("number", [*STOPPING, signal.SIGUSR1])
def test_what_nohup_has_made_ignored_stays_ignored(number: signal.Signals):
    with handler(number, signal.SIG_IGN):
        world = World(Placement())
        with training(world, save_signal=signal.SIGUSR1):
            assert signal.getsignal(number) is signal.SIG_IGN
            signal.raise_signal(number)
        assert not any(world.take_flag(flag) for flag in Flag)


def test_the_save_signal_asks_for_a_checkpoint_and_then_calls_the_applications_handler():
    calls: list[int] = []
    with handler(signal.SIGUSR1, lambda number, frame: calls.append(number)):
        world = World(Placement())
        with training(world, save_signal=signal.SIGUSR1) as signals:
            signal.raise_signal(signal.SIGUSR1)
            assert world.take_flag(Flag.SAVE)
            assert calls == []
            signals.pass_on()
            assert calls == [signal.SIGUSR1]
        assert len(calls) == 1


def test_before_the_first_step_the_save_signal_does_nothing():
    with Signals(save_signal=signal.SIGUSR1).handled():
        signal.raise_signal(signal.SIGUSR1)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux's /proc")
def test_a_handler_that_python_does_not_know_of_stays_and_is_told(caplog: pytest.LogCaptureFixture):
    import faulthandler

    faulthandler.register(signal.SIGUSR1)
    try:
        with training(save_signal=signal.SIGUSR1):
            assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    finally:
        faulthandler.unregister(signal.SIGUSR1)
    assert "SIGUSR1 has a handler that Python does not know of" in caplog.text


def test_a_forked_process_ends_by_its_own_signals_and_ours_does_not():
    with training() as signals:
        child = os.fork()
        if not child:
            signal.raise_signal(signal.SIGTERM)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
        assert not signals.stopped_by


def test_handlers_and_the_wakeup_descriptor_are_put_back():
    numbers = [*STOPPING, signal.SIGUSR1]
    before = [signal.getsignal(number) for number in numbers]
    with training(save_signal=signal.SIGUSR1):
        assert all(signal.getsignal(number) not in before for number in numbers)
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_outside_the_main_thread_signals_are_left_alone():
    entered = []

    def work() -> None:
        with training(save_signal=signal.SIGUSR1):
            entered.append([signal.getsignal(number) for number in STOPPING])

    before = [signal.getsignal(number) for number in STOPPING]
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert entered == [before]
