"""What reaches the terminal: unipar's own log lines, and not a framework's."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def logging_to_terminal(level: str, *, main: bool) -> Iterator[None]:
    """Show the ``unipar`` logger on standard error for the length of the block.

    An application that has set logging up itself is left alone.

    Args:
        level: the lowest level shown.
        main: whether this is rank 0; other ranks show warnings and errors at most.
    """
    logger = logging.getLogger("unipar")
    before = logger.level
    if logger.handlers or logging.getLogger().handlers:
        yield
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("unipar: %(message)s"))
    logger.addHandler(handler)
    lowest: int = getattr(logging, level.upper())
    logger.setLevel(lowest if main else max(lowest, logging.WARNING))
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


@contextlib.contextmanager
def quiet_framework(*loggers: str) -> Iterator[None]:
    """Keep a framework's banners and warnings from the terminal, within the block.

    Put it around what imports or sets up a framework, not around the user's own code. With unipar's
    log level at ``debug`` everything is shown. Its loggers keep their level after the block.

    Args:
        loggers: names of the framework's loggers.
    """
    shown = logging.getLogger("unipar").isEnabledFor(logging.DEBUG)
    for name in loggers:
        logging.getLogger(name).setLevel(logging.INFO if shown else logging.ERROR)
    if shown:
        yield
        return
    printed = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
        warnings.simplefilter("ignore")
        yield
