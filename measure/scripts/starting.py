"""What some frameworks need on this machine before a script of theirs can run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from measure.raw.horovod import meeting_point

__all__ = ["meeting_point", "without_kernel"]


@contextlib.contextmanager
def without_kernel() -> Iterator[None]:
    """DeepSpeed without the kernel for collectives on one host that it would compile first.

    The strategies of unipar do not use it either.
    """
    deepspeed: Any = import_module("deepspeed")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    yield
