"""Where built wheels are kept, and under what name."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

from unipar.errors import ConfigError
from unipar.install.recipe import Build

_COMPILER = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS")


def cache_directory() -> Path:
    """``$XDG_CACHE_HOME/unipar``, or ``~/.cache/unipar``; made if it is not there.

    Raises:
        ConfigError: it cannot be written.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(base, "unipar")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(f"{directory} is not writable")
    except OSError as error:
        raise ConfigError(
            f"wheels and logs are kept in {directory}, and that cannot be written: {error}. "
            "Set XDG_CACHE_HOME to a directory that can."
        ) from error
    return directory


def torch_version() -> str:
    """The installed torch, as pip knows it: ``2.13.0+cpu``."""
    return metadata.version("torch")


def wheel_directory(build: Build) -> Path:
    """Where the wheel of this build is kept: for this version, torch, Python and these flags."""
    python = f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
    return (
        cache_directory()
        / "wheels"
        / f"{build.distribution}-{build.version}-torch{torch_version()}-{python}-{_flags(build)}"
    )


def cached_wheel(build: Build) -> Path | None:
    """The wheel of this build, if it has been made before."""
    return next(iter(sorted(wheel_directory(build).glob("*.whl"))), None)


def _flags(build: Build) -> str:
    """A short name of everything else that the wheel depends on."""
    sensitive = {
        name: value
        for name, value in os.environ.items()
        if name in _COMPILER or name.startswith(build.sensitive)
    }
    content = {
        "sha256": build.sha256,
        "edits": [[edit.file, edit.old, edit.new] for edit in build.edits],
        "tools": build.tools,
        "environment": {**sensitive, **build.environment},
        "machine": platform.machine(),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
