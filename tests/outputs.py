"""What a program has said itself."""

from __future__ import annotations

import re

_GLOO = re.compile(r"^\[Gloo\] Rank \d+ is connected to .*\n", re.MULTILINE)


def own(stdout: str) -> str:
    """Without the lines that gloo of torch 2.8 writes to stdout for each group of processes."""
    return _GLOO.sub("", stdout)
