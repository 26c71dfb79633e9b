"""What unipar warns of, in a process of a test."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


class _Warnings(logging.Handler):
    def __init__(self, said: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())


@contextlib.contextmanager
def warned_of() -> Iterator[list[str]]:
    """Collect the warnings that are given within the block."""
    said: list[str] = []
    handler, log = _Warnings(said), logging.getLogger("unipar")
    log.addHandler(handler)
    try:
        yield said
    finally:
        log.removeHandler(handler)
