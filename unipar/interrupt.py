"""Ctrl-C: finish the step, save, and end; at once when pressed again."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from unipar.world import Flag, World


@contextlib.contextmanager
def interruptible(world: World) -> Iterator[None]:
    """Turn the first SIGINT into :attr:`Flag.INTERRUPT`, and the second into KeyboardInterrupt.

    One that came too late for a step to see it takes effect at the end of the block.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    pressed = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        world.raise_flag(Flag.INTERRUPT)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        signal.raise_signal(signal.SIGINT)
