"""Which of the places that this process imports from are the user's."""

from __future__ import annotations

import os
import sys


def own_path() -> list[str]:
    """The directories of ``sys.path`` that belong to the user, and to no environment."""
    roots = [os.path.realpath(root) for root in {sys.prefix, sys.base_prefix}]

    def inside(entry: str) -> bool:
        return any(os.path.realpath(entry).startswith(root + os.sep) for root in roots)

    entries = [entry or os.getcwd() for entry in sys.path]
    # A virtual environment in the project's directory is no reason to leave the project out.
    return [entry for entry in entries if os.path.isdir(entry) and not inside(entry)]
