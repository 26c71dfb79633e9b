"""Leaving the garbage collector out of what leaves no garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Look for no garbage in the block.

    For what makes many objects that stay. With imports, looking through them again and again takes
    a tenth of the time that it takes to import torch, and up to a third for the larger frameworks.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
