"""The variables that ``accelerate launch`` sets, which count where a script says nothing.

Accelerate 1.15.0 sets them in utils/launch.py, and reads them in state.py, accelerator.py and
utils/dataclasses.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

_ON = ("1", "on", "t", "true", "y", "yes")
_OPEN = ("", "auto", "none")


def says(name: str) -> str | None:
    """The value of a variable of Accelerate's, if it says anything."""
    return word(os.environ.get(f"ACCELERATE_{name}", ""))


def asks_for(name: str) -> bool:
    """Whether a switch among these variables is on."""
    return bool(switch(os.environ.get(f"ACCELERATE_{name}", "")))


def precision() -> str | None:
    """What is launched in another precision than fp32; a file of DeepSpeed's may say one, too."""
    said = says("MIXED_PRECISION")
    return None if said == "no" else said


def word(text: str) -> str | None:
    """A value as it is; ``None`` where it leaves the setting open."""
    return None if text.lower() in _OPEN else text


def number(text: str) -> float | None:
    """A number, likewise."""
    return None if word(text) is None else float(text)


def count(text: str) -> int | None:
    """An integer, likewise."""
    return None if word(text) is None else int(text)


def switch(text: str) -> bool | None:
    """``True`` where it is on; off is what settings are by default."""
    return True if text.lower() in _ON else None


def fill(settings: Any, variables: Mapping[str, tuple[str, Callable[[str], Any]]]) -> None:
    """Take fields that a script has left open from the environment.

    Args:
        settings: has the fields.
        variables: by field the variable, and what reads it.
    """
    for name, (variable, read) in variables.items():
        if getattr(settings, name) is None and variable in os.environ:
            setattr(settings, name, read(os.environ[variable]))
