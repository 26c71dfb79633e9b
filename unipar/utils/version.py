"""The version of this package, where its own modules can import it, and those that it rests on."""

import sys
from importlib import metadata

__version__ = "0.1.0"


def own_versions() -> dict[str, str]:
    """The versions by which a function and what it uses are understood elsewhere."""
    python = ".".join(map(str, sys.version_info[:2]))
    # Builds for other devices, such as 2.13.0+cpu, are the same here.
    found = {name: metadata.version(name).split("+")[0] for name in ("torch", "unipar")}
    return {"Python": python, **found}
