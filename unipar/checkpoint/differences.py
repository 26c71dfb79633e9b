"""Telling how stored tensors differ from those that a model wants."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from unipar.errors import did_you_mean

MAX_LINES = 18

Shape = tuple[int, ...]


def describe_differences(
    what: str,
    path: Path | str,
    wanted: Mapping[str, Shape],
    stored: Mapping[str, Shape],
    *,
    exact: bool = True,
) -> str | None:
    """One screen that lists missing, unexpected and misshapen tensors, or ``None``.

    Args:
        what: what the tensors are.
        path: the checkpoint, or what else holds them.
        wanted: the shapes that are asked for.
        stored: the shapes that there are.
        exact: whether all that is stored must be asked for.
    """
    missing = [name for name in wanted if name not in stored]
    unexpected = [name for name in stored if name not in wanted] if exact else []
    misshapen = [name for name in wanted if name in stored and wanted[name] != stored[name]]
    if not (missing or unexpected or misshapen):
        return None
    shown = [
        *_some(
            f"shapes differ ({len(misshapen)}):",
            [
                f"{name}: stored {list(stored[name])}, wanted {list(wanted[name])}"
                for name in misshapen
            ],
        ),
        *_some(
            f"missing in the checkpoint ({len(missing)}):",
            [
                f"{name} {list(wanted[name])}{did_you_mean(name, unexpected[:500])}"
                for name in missing[:MAX_LINES]
            ],
            len(missing),
        ),
        *_some(
            f"in the checkpoint only ({len(unexpected)}):",
            [f"{name} {list(stored[name])}" for name in unexpected],
        ),
    ]
    return "\n".join(
        [
            f"The {what} in {path} do not fit this model:",
            *shown,
            "Build the model with the same layers and sizes as the saved one.",
        ]
    )


def _some(title: str, lines: list[str], count: int | None = None) -> list[str]:
    """A titled list, cut to a third of the screen."""
    if not lines:
        return []
    count = len(lines) if count is None else count
    room = MAX_LINES // 3
    shown = [f"    {line}" for line in lines[:room]]
    if count > room:
        shown.append(f"    … and {count - room} more")
    return [f"  {title}", *shown]
