"""The installed Horovod and how it was built, found without importing it."""

from __future__ import annotations

import json
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch

from unipar.strategy import Availability

VERSION = "0.28.1"
_MARK = "unipar"
_REMEDY = "unipar install horovod"


def availability() -> Availability:
    """Return whether the tested Horovod is installed, built for the installed torch."""
    try:
        found = metadata.version("horovod")
    except metadata.PackageNotFoundError:
        return Availability(False, "Horovod is not installed.", _REMEDY)
    if found.partition("+")[0] != VERSION:
        reason = f"Horovod {found} is installed, and this backend is for {VERSION}."
        return Availability(False, reason, _REMEDY)
    folder = _folder()
    if folder is None or _library(folder) is None:
        reason = "Horovod is installed without its library for PyTorch."
        return Availability(False, reason, f"{_REMEDY} --force")
    # What torch calls itself: to pip, the package index's CUDA build has no "+cu130".
    built, here = _built_for(folder), str(torch.__version__)
    if built not in (None, here):
        reason = f"Horovod was built for torch {built}, and torch {here} is installed."
        return Availability(False, reason, f"{_REMEDY} --force")
    return Availability(True)


def local_version(built_for: str) -> str:
    """Return what the recipe adds to Horovod's version, to know its own builds by."""
    return f"torch{built_for.replace('+', '.')}.{_MARK}"


def starts_again() -> bool:
    """Return whether a process may start it twice with a fusion threshold or cycle time set.

    Upstream it then writes past the end of a vector (horovod/common/parameter_manager.cc,
    ``BayesianParameter::SetValue``); the recipe fixes that.
    """
    return metadata.version("horovod").endswith(f".{_MARK}")


@cache
def has_mpi() -> bool:
    """Return whether the installed Horovod was built with MPI."""
    folder = _folder()
    library = None if folder is None else _library(folder)
    return library is not None and b"libmpi" in library.read_bytes()


def _folder() -> Path | None:
    spec = find_spec("horovod")
    places = spec.submodule_search_locations if spec is not None else None
    return Path(places[0]) if places else None


def _library(folder: Path) -> Path | None:
    return next((folder / "torch").glob("mpi_lib_v2*.so"), None)


def _built_for(folder: Path) -> str | None:
    """The torch that the library was compiled against; a library for another one crashes."""
    file = folder / "metadata.json"
    return json.loads(file.read_text()).get("pytorch") if file.is_file() else None
