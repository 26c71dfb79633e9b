"""Loggers that speak on rank 0."""

from __future__ import annotations

import logging
from typing import Any

from unipar.errors import ConfigError
from unipar.migrated import script


def get_logger(name: str, log_level: str | None = None) -> logging.LoggerAdapter[Any]:
    """A logger that speaks on rank 0, or everywhere with ``main_process_only=False``."""
    logger = logging.getLogger(name)
    if log_level is not None:
        logger.setLevel(log_level.upper())
    return _RankLogger(logger, {})


# Python 3.10's LoggerAdapter takes no type argument when the program runs.
class _RankLogger(logging.LoggerAdapter):
    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        everywhere = not kwargs.pop("main_process_only", True)
        if kwargs.pop("in_order", False):
            raise ConfigError("loggers speak in no order here: leave in_order out.")
        if everywhere or script.placement().rank == 0:
            kwargs.setdefault("stacklevel", 2)
            super().log(level, msg, *args, **kwargs)
