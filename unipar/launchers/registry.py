"""Finding launchers by entry point, and making one from what a user wrote.

A distribution offers a launcher in the entry-point group ``unipar.launchers``, as it does a
strategy in ``unipar.strategies``. No launcher is imported until it is asked for by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from unipar.launchers.base import Launcher, LauncherOptions
from unipar.utils.documents import KeyPath
from unipar.utils.plugins import Plugins

LAUNCHERS = Plugins(
    group="unipar.launchers",
    kind="launcher",
    base=(Launcher, "unipar.launchers.Launcher"),
    example="slurm:partition=gpu,time='4:00:00'",
    elsewhere="A launcher of another system comes with a distribution that offers one.",
)
"""The launchers that are installed."""


def as_mapping(launcher: str | Mapping[str, Any] | LauncherOptions) -> dict[str, Any]:
    """Return what was written, as ``{"name": …, **options}``; the options are not validated.

    Raises:
        ConfigError: it has no name, or an inline option is not ``key=value``.
    """
    if isinstance(launcher, LauncherOptions):
        given = launcher.model_dump(mode="json", exclude_unset=True)
        return {"name": type(launcher).launcher, **given}
    return LAUNCHERS.as_mapping(launcher)


def resolve(
    launcher: str | Mapping[str, Any] | LauncherOptions,
    *,
    where: Callable[[KeyPath], str] = lambda key: "",
) -> Launcher:
    """Make the launcher that was asked for by name; whether it can be used here is not looked at.

    Args:
        launcher: a name (``"mpi"``), a name with options (``"mpi:hosts=[a,b]"``), a mapping
            (``{"name": "slurm", "partition": "gpu"}``), or an options object.
        where: tells where an option was set, such as a file and line, or an empty string.

    Raises:
        ConfigError: there is no such launcher or option.
    """
    if isinstance(launcher, LauncherOptions):
        found, options = LAUNCHERS.load(type(launcher).launcher), launcher
    else:
        wanted = as_mapping(launcher)
        name = wanted.pop("name")
        found = LAUNCHERS.load(name)
        options = LAUNCHERS.options(name, found.options_type, wanted, where=where)
    return found(options)
