"""``deepspeed.utils``: logging, and a loader that repeats."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from unipar.compat.deepspeed.accelerator import get_accelerator
from unipar.compat.deepspeed.data import RepeatingLoader
from unipar.compat.deepspeed_names import UTILS
from unipar.compat.run import current

__all__ = ["RepeatingLoader", "instrument_w_nvtx", "log_dist", "logger", "see_memory_usage"]

logger = logging.getLogger("DeepSpeed")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on some ranks; ``None`` and -1 stand for all."""
    rank = current.placement().rank
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log how much memory of a GPU is used, if it is forced."""
    if force:
        used, most = (
            getattr(get_accelerator(), name)() / 2**30
            for name in ("memory_allocated", "max_memory_allocated")
        )
        log_dist(f"{message}: {used:.2f} GiB, at most {most:.2f} GiB", ranks=[0])


def instrument_w_nvtx(func: Any) -> Any:
    """The function."""
    return func


def _modules(model: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """Nothing: which parameters a module uses is found without being told."""
    return []


def _leaf(name: str) -> Any:
    return _modules if "z3_leaf" in name else None


__getattr__ = UTILS.refusing(__name__, _leaf)
