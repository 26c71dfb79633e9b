"""unipar's own log lines on the terminal, unless the application has set logging up itself."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def logging_to_terminal(level: str, *, main: bool) -> Iterator[None]:
    """Show the ``unipar`` logger on standard error for the length of the block.

    Args:
        level: the lowest level shown.
        main: whether this is rank 0; other ranks show warnings and errors only.
    """
    logger = logging.getLogger("unipar")
    before = logger.level
    if logger.handlers or logging.getLogger().handlers:
        yield
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("unipar: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level.upper() if main else logging.WARNING)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
