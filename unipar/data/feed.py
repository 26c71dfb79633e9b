"""Batches on their way to a GPU: each micro-batch is copied while the one before it is computed."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any, TypeVar

import torch

from unipar.data.batch import Batch, MicroBatch
from unipar.data.move import can_be_recorded, move_to, pinned, record_stream

Begin = Callable[[Any], Callable[[], Any]]
"""Begins to copy data, and gives what is called to have the copy, once, where it is used."""
T = TypeVar("T")
_HOST = torch.device("cpu")


def on_device(microbatch: MicroBatch, device: torch.device) -> Any:
    """The data of a micro-batch on ``device``: the copy that a feed has begun, or one made now.

    The copy of the micro-batch after it begins here, beside what is computed of this one.
    """
    if isinstance(microbatch.copy, Copy) and microbatch.copy.device == device:
        return microbatch.copy.take(microbatch.data)
    if device == _HOST:
        return microbatch.data
    return move_to(microbatch.data, device)


def copies_to(device: torch.device) -> Begin | None:
    """Copies on a stream of their own; ``None`` for a device that has no streams."""
    if device.type != "cuda":
        return None
    stream = _copying_stream(device)

    def begin(data: Any) -> Callable[[], Any]:
        if not can_be_recorded(data, device):
            return lambda: move_to(data, device)
        with torch.cuda.stream(stream):
            moved = move_to(pinned(data), device)
            copied = stream.record_event()

        def finish() -> Any:
            using = torch.cuda.current_stream(device)
            using.wait_event(copied)
            # The memory is the copying stream's, which must not write to it before it is used.
            record_stream(moved, using)
            return moved

        return finish

    return begin


@functools.cache
def _copying_stream(device: torch.device) -> torch.cuda.Stream:
    # One for all: freed memory is kept for the stream that it was of.
    return torch.cuda.Stream(device)


def pins_for(device: torch.device) -> bool | None:
    """Return a loader's ``pin_memory`` for ``device``; ``None`` leaves it to the data."""
    return True if device.type == "cuda" else None


class Copy:
    """The copy of a micro-batch's data, from before it is used until it is.

    Args:
        data: on the host.
        device: where to.
        begin: begins a copy.
    """

    def __init__(self, data: Any, device: torch.device, begin: Begin) -> None:
        self.device = device
        self._data, self._begin = data, begin
        self._finish: Callable[[], Any] | None = None
        self._following: Callable[[], Copy | None] = lambda: None
        self.taken = False

    def follow(self, copy: Copy) -> None:
        """Begin ``copy`` as soon as this one is taken, if somebody still holds it by then."""
        self._following = weakref.ref(copy)

    def begin(self) -> None:
        try:
            self._finish = self._begin(self._data)
        except Exception:
            # It may be memory that this step needs and the next has. The micro-batch is copied when
            # its turn comes; what is wrong with it is said then.
            self._finish = None

    def take(self, data: Any) -> Any:
        """The copy, for what is computed on the current stream.

        Args:
            data: what the micro-batch holds by now; if it is something else, that is copied.
        """
        finish, self._finish, self.taken = self._finish, None, True
        begun = finish if data is self._data else None
        found = move_to(data, self.device) if begun is None else begun()
        following = self._following()
        if following is not None:
            following.begin()
        self._following = lambda: None
        return found


def fed(
    reading: Generator[tuple[Batch, T], None, None],
    device: torch.device,
    begin: Begin,
    *,
    ahead: bool,
    limit: int | None = None,
) -> Generator[tuple[Batch, T], None, None]:
    """Batches whose copies to a device have begun when they are used.

    An error of ``reading`` is raised where its batch would have come.

    Args:
        reading: batches on the host, each with what belongs to it.
        device: where they go.
        begin: begins a copy.
        ahead: whether each batch is read before the one that it follows is used, so that its first
            micro-batch is copied beside the other's last.
        limit: how many batches will be used, as far as is known: none is read ahead beyond them.
    """
    last: Copy | None = None
    num_read = 0

    def read() -> Callable[[], tuple[Batch, T]]:
        nonlocal last, num_read
        num_read += 1
        try:
            batch, rest = next(reading)
        except Exception as error:
            return _raising(error)
        parts = []
        for part in batch:
            copy = Copy(part.data, device, begin)
            if last is None or last.taken:
                copy.begin()
            else:
                last.follow(copy)
            parts.append(replace(part, copy=copy))
            last = copy
        found = replace(batch, microbatches=tuple(parts)), rest
        return lambda: found

    with contextlib.closing(reading):
        coming = read()
        while True:
            try:
                found = coming()
            except StopIteration:
                return
            early = ahead and (limit is None or num_read < limit)
            if early:
                coming = read()
            yield found
            if not early:
                coming = read()


def _raising(error: Exception) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail
