"""Loggers that speak on the ranks that are named."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from unipar.compat.colossalai_names import LOGGING
from unipar.compat.run import current

__all__ = ["DistributedLogger", "disable_existing_loggers", "get_dist_logger"]

_LEVELS = ("INFO", "DEBUG", "WARNING", "ERROR")
_FORM = logging.Formatter("colossalai - %(name)s - %(levelname)s: %(message)s")


class DistributedLogger:
    """A logger of one name, with the ranks that a message is for.

    Args:
        name: of the logger.
    """

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        self._logger.setLevel(logging.INFO)
        self._logger.propagate = False
        self._add(logging.StreamHandler())

    @staticmethod
    def get_instance(name: str) -> DistributedLogger:
        """The logger of a name."""
        if name not in _made:
            _made[name] = DistributedLogger(name)
        return _made[name]

    @property
    def rank(self) -> int:
        """This process's rank."""
        return current.placement().rank

    def set_level(self, level: str) -> None:
        """Log what is at least of a level."""
        self._logger.setLevel(_level(level))

    def log_to_file(
        self, path: str | Path, mode: str = "a", level: str = "INFO", suffix: str | None = None
    ) -> None:
        """Log to a file of this rank's in a directory, too."""
        Path(path).mkdir(parents=True, exist_ok=True)
        name = f"rank_{self.rank}{f'_{suffix}' if suffix is not None else ''}.log"
        handler = logging.FileHandler(Path(path) / name, mode)
        handler.setLevel(_level(level))
        self._add(handler)

    def info(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Log on some ranks; left out: on all."""
        self._log(logging.INFO, message, ranks)

    def warning(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Log on some ranks; left out: on all."""
        self._log(logging.WARNING, message, ranks)

    def debug(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Log on some ranks; left out: on all."""
        self._log(logging.DEBUG, message, ranks)

    def error(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Log on some ranks; left out: on all."""
        self._log(logging.ERROR, message, ranks)

    def _add(self, handler: logging.Handler) -> None:
        handler.setFormatter(_FORM)
        self._logger.addHandler(handler)

    def _log(self, level: int, message: str, ranks: Sequence[int] | None) -> None:
        if ranks is None or self.rank in ranks:
            self._logger.log(level, message)


_made: dict[str, DistributedLogger] = {}


def get_dist_logger(name: str = "colossalai") -> DistributedLogger:
    """The logger of a name."""
    return DistributedLogger.get_instance(name)


def disable_existing_loggers(
    include: Sequence[str] | None = None, exclude: Sequence[str] = ("colossalai",)
) -> None:
    """Let loggers that there are say warnings and errors alone.

    Args:
        include: their names; left out: all but those of ``exclude``.
        exclude: the others' names.
    """
    for name in list(logging.Logger.manager.loggerDict):
        if name in include if include is not None else name not in exclude:
            logging.getLogger(name).setLevel(logging.WARNING)


def _level(name: str) -> int:
    assert name in _LEVELS, "found invalid logging level"
    return getattr(logging, name)


__getattr__ = LOGGING.refusing(__name__)
