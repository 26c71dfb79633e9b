"""Where a user's files are that may be thrown away."""

from __future__ import annotations

import os
from pathlib import Path

from unipar.errors import ConfigError


def cache_directory() -> Path:
    """``$XDG_CACHE_HOME/unipar``, or ``~/.cache/unipar``; made if it is not there.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        # Containers run under users that the system does not know.
        raise ConfigError(f"{error} Set HOME, or XDG_CACHE_HOME to a directory.") from error
    directory = Path(base, "unipar")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(f"{directory} is not writable")
    except OSError as error:
        raise ConfigError(
            f"what is kept between runs is in {directory}, and that cannot be written: {error}. "
            "Set XDG_CACHE_HOME to a directory that can."
        ) from error
    return directory
