"""Loggers that speak on the ranks that are named."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from unipar.migrated import script


class Logger:
    """A logger whose messages name the ranks that say them, as ``get_dist_logger`` gives it."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def info(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Log on some ranks; left out: on all."""
        self._log(logging.INFO, message, ranks)

    def warning(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Log on some ranks; left out: on all."""
        self._log(logging.WARNING, message, ranks)

    def error(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Log on some ranks; left out: on all."""
        self._log(logging.ERROR, message, ranks)

    def debug(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Log on some ranks; left out: on all."""
        self._log(logging.DEBUG, message, ranks)

    def _log(self, level: int, message: str, ranks: Sequence[int] | None) -> None:
        if ranks is None or script.placement().rank in ranks:
            self._logger.log(level, message)


def get_dist_logger(name: str = "unipar.script") -> Logger:
    """A logger that can speak on some ranks alone."""
    return Logger(name)
