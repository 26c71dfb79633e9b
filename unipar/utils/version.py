"""The version of this package, where its own modules can import it, and those that it rests on."""

import sys
from importlib import metadata

__version__ = "0.1.0"


def own_versions() -> dict[str, str]:
    """The versions by which a function and what it uses are understood elsewhere."""
    python = ".".join(map(str, sys.version_info[:2]))
    return {"Python": python, **{name: metadata.version(name) for name in ("torch", "unipar")}}
