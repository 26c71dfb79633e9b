"""Ctrl-C: the first asks, the second ends, and none is lost."""

from __future__ import annotations

import signal
import threading

import pytest

from unipar.interrupt import interruptible
from unipar.world import Flag, Placement, World


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_the_first_asks_for_the_end_of_the_step():
    world = World(Placement())
    obeyed = []

    def stop_when_asked() -> None:
        with interruptible(world):
            press()
            obeyed.append(world.take_flag(Flag.INTERRUPT))
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        stop_when_asked()
    assert obeyed == [True]


def test_the_second_ends_at_once():
    reached = []

    def press_twice() -> None:
        with interruptible(World(Placement())):
            press()
            reached.append(1)
            press()
            reached.append(2)

    with pytest.raises(KeyboardInterrupt):
        press_twice()
    assert reached == [1]


def test_one_that_comes_too_late_for_a_step_counts_at_the_end():
    reached = []

    def finish() -> None:
        with interruptible(World(Placement())):
            press()
            reached.append("saved")

    with pytest.raises(KeyboardInterrupt):
        finish()
    assert reached == ["saved"]


def test_the_applications_own_handler_is_put_back_and_called():
    calls: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        with interruptible(World(Placement())):
            press()
            assert calls == []
        assert calls == [signal.SIGINT]
        press()
        assert len(calls) == 2
    finally:
        signal.signal(signal.SIGINT, before)


def test_outside_the_main_thread_signals_are_left_alone():
    entered = []

    def work() -> None:
        with interruptible(World(Placement())):
            entered.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert entered == [before]
