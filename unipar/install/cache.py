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

from unipar.install.recipe import Build
from unipar.utils.cache import cache_directory

_COMPILER = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS")


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
