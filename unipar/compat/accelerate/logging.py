"""Loggers that speak on rank 0."""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

from unipar.compat.run import current
from unipar.compat.tables import Table


# Python 3.10's LoggerAdapter takes no type argument when the program runs.
class MultiProcessAdapter(logging.LoggerAdapter):
    """A logger that speaks on rank 0, or everywhere with ``main_process_only=False``."""

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log; with ``in_order=True`` on each rank in turn, which is collective."""
        everywhere = not kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        place = current.placement()
        kwargs.setdefault("stacklevel", 2)
        if not in_order:
            if everywhere or place.rank == 0:
                super().log(level, f"[RANK {place.rank}] {msg}", *args, **kwargs)
            return
        for rank in range(place.size):
            if rank == place.rank:
                super().log(level, f"[RANK {rank}] {msg}", *args, **kwargs)
            current.world().barrier()

    @functools.lru_cache(None)  # noqa: B019 - one for each logger of a script
    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """A warning that is not repeated."""
        self.warning(*args, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """A logger of a module.

    Args:
        name: of the module.
        log_level: left out: ``ACCELERATE_LOG_LEVEL``, or as logging is set.
    """
    level = log_level or os.environ.get("ACCELERATE_LOG_LEVEL")
    logger = logging.getLogger(name)
    if level is not None:
        logger.setLevel(level.upper())
        logger.root.setLevel(level.upper())
    return MultiProcessAdapter(logger, {})


__getattr__ = Table("accelerate.logging").refusing(__name__)
