"""Horovod as a strategy of unipar."""

from unipar_horovod.processes import process_set

__all__ = ["process_set"]
