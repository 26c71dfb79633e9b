"""The installed Colossal-AI, found without importing it, and the recipe that installs it."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec

from unipar.install import Pip, Recipe
from unipar.strategy import Availability

VERSION = "0.5.0"
TRANSFORMERS = "4.51.3"
"""Colossal-AI 0.5.0 imports names that transformers has dropped since."""

_REMEDY = "unipar install colossalai"


def availability() -> Availability:
    """Return whether Colossal-AI is installed in the tested version, with what it imports."""
    for distribution, name, wanted in (
        ("colossalai", "Colossal-AI", VERSION),
        ("transformers", "transformers", TRANSFORMERS),
    ):
        try:
            found = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            return Availability(False, f"{name} is not installed.", _REMEDY)
        if found.partition("+")[0] != wanted:
            reason = f"{name} {found} is installed, and this backend works with {wanted}."
            return Availability(False, reason, f"{_REMEDY}, in an environment of its own")
    missing = [name for name in ("peft", "accelerate", "einops", "psutil") if not find_spec(name)]
    if missing:
        return Availability(False, f"Colossal-AI lacks {', '.join(missing)}.", f"{_REMEDY} --force")
    return Availability(True)


def recipe() -> Recipe:
    """How Colossal-AI comes beside the torch that is installed.

    Its metadata asks for torch 2.5 at most, and for servers and tools that training never imports.
    """
    return Recipe(
        name="colossalai",
        framework=f"Colossal-AI {VERSION}",
        steps=(
            Pip((f"transformers=={TRANSFORMERS}", "einops", "psutil", "rich")),
            Pip(
                (f"colossalai=={VERSION}", "peft==0.13.2", "accelerate==1.15.0"),
                args=("--no-deps",),
            ),
        ),
        needs={"transformers": TRANSFORMERS},
        alone=f"it needs transformers {TRANSFORMERS}, which other frameworks have left behind",
    )
