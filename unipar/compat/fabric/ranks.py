"""What is done on rank 0 alone, also before there is a ``Fabric``."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

from unipar.compat.run import current
from unipar.launch import detect

log = logging.getLogger("unipar")


def rank() -> int:
    """This process's rank; it does not settle what the run's device is."""
    if current.session is not None:
        return current.placement().rank
    found = detect()
    return found.rank if found is not None else 0


class _RankZeroOnly:
    @property
    def rank(self) -> int:
        """This process's rank."""
        return rank()

    def __call__(self, fn: Callable[..., Any], default: Any = None) -> Callable[..., Any]:
        """The function on rank 0; elsewhere nothing is called, and ``default`` returned."""

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs) if rank() == 0 else default

        return call


rank_zero_only = _RankZeroOnly()


@rank_zero_only
def rank_zero_debug(*args: Any, stacklevel: int = 4, **kwargs: Any) -> None:
    """Log for debugging on rank 0."""
    log.debug(*args, stacklevel=stacklevel, **kwargs)


@rank_zero_only
def rank_zero_info(*args: Any, stacklevel: int = 4, **kwargs: Any) -> None:
    """Log on rank 0."""
    log.info(*args, stacklevel=stacklevel, **kwargs)


@rank_zero_only
def rank_zero_warn(message: Any, stacklevel: int = 4, **kwargs: Any) -> None:
    """Warn on rank 0."""
    warnings.warn(message, stacklevel=stacklevel, **kwargs)


@rank_zero_only
def rank_zero_deprecation(message: Any, stacklevel: int = 5, **kwargs: Any) -> None:
    """Warn on rank 0 of what will go."""
    warnings.warn(message, stacklevel=stacklevel, category=DeprecationWarning, **kwargs)
