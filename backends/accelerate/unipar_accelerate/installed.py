"""The installed Accelerate, found without importing it, and the recipe that installs it."""

from __future__ import annotations

import importlib.util
from importlib import metadata

from unipar.install import Pip, Recipe
from unipar.strategy import Availability

VERSION = "1.15.0"
_REMEDY = "unipar install accelerate"


def availability() -> Availability:
    """Return whether Accelerate is installed, in a version that was tested."""
    if importlib.util.find_spec("accelerate") is None:
        return Availability(False, "Accelerate is not installed.", _REMEDY)
    found, wanted = metadata.version("accelerate"), VERSION.rpartition(".")[0]
    if found.split(".")[:2] != wanted.split("."):
        reason = f"Accelerate {found} is installed, and this backend works with {wanted}."
        return Availability(False, reason, _REMEDY)
    return Availability(True)


def recipe() -> Recipe:
    """How Accelerate gets into an environment that has torch."""
    return Recipe("accelerate", f"Accelerate {VERSION}", (Pip((f"accelerate=={VERSION}",)),))
