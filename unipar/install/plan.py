"""From a recipe to what is done: checks, commands, the wheel from the cache or newly built."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from unipar.errors import ConfigError, InstallError
from unipar.install.build import build_wheel, shell
from unipar.install.cache import cache_directory, cached_wheel, torch_version, wheel_directory
from unipar.install.commands import Command, Runner, pip
from unipar.install.recipe import Build, Pip, Recipe, Step

_SMOKE_TIMEOUT = 300.0

Show = Callable[[str], None]
Progress = Callable[[str], AbstractContextManager[Show]]
"""Around one action, given its title; what it yields is called with a line of what happens."""


@dataclass(frozen=True)
class Action:
    """One thing that is done.

    Attributes:
        title: what, in a line.
        shell: the same as one would type it.
        do: does it.
    """

    title: str
    shell: tuple[str, ...]
    do: Callable[[Runner], object]


def check(recipe: Recipe) -> None:
    """Refuse what cannot work, before anything is changed.

    Raises:
        ConfigError: a program is missing, or another version is needed of something installed.
    """
    if find_spec("pip") is None:
        raise ConfigError(
            f"{sys.executable} has no pip. Add it: {sys.executable} -m ensurepip, or with uv: "
            "uv pip install pip."
        )
    missing = [one for one in recipe.programs if not any(map(shutil.which, one.names))]
    if missing:
        names = ", ".join(" or ".join(one.names) for one in missing)
        packages = " ".join(sorted({one.debian for one in missing}))
        raise ConfigError(
            f"{recipe.framework} needs {names}, and that is not on the PATH. On Debian and Ubuntu: "
            f"apt-get install {packages}"
        )
    clashes = [
        f"{name} {found} is installed and it needs {name} {wanted}"
        for name, wanted in recipe.needs.items()
        if (found := _installed(name)) not in (None, wanted)
    ]
    if clashes:
        raise ConfigError(
            f"{recipe.framework} cannot live in {sys.prefix}: {'; '.join(clashes)}. "
            f"{recipe.alone or 'Give it an environment of its own'}: "
            f"{Path(sys.executable).name} -m venv {recipe.name}-env, then install unipar, "
            f"unipar-{recipe.name} and 'unipar install {recipe.name}' there."
        )


def plan(recipe: Recipe, *, force: bool = False) -> list[Action]:
    """List the steps that carry out the recipe, in order; nothing is done yet.

    Args:
        recipe: the backend's description.
        force: build wheels again that are in the cache.
    """
    actions = [action for step in recipe.steps for action in _actions(step, force)]
    strategy = recipe.smoke or recipe.name
    smoke = Command(
        (sys.executable, "-m", "unipar.install.smoke", strategy, recipe.smoke_precision)
    )
    check = Action(
        f"check that '{strategy}' trains on 2 processes as plain PyTorch does",
        (smoke.shell(),),
        lambda run: run(smoke, timeout=_SMOKE_TIMEOUT),
    )
    return [*actions, check]


def carry_out(name: str, actions: Iterable[Action], progress: Progress) -> Path:
    """Do all of it.

    Returns:
        The log.

    Raises:
        InstallError: an action failed; those after it were not begun.
    """
    logs = cache_directory() / "logs"
    logs.mkdir(exist_ok=True)
    log = logs / f"install-{name}-{time.strftime('%Y%m%d-%H%M%S')}.log"
    for action in actions:
        with progress(action.title) as show:
            try:
                action.do(Runner(log, show))
            except InstallError as error:
                raise InstallError(f"cannot {action.title}: {error}") from error
    return log


def _actions(step: Step, force: bool) -> list[Action]:
    if isinstance(step, Build):
        return _built(step, force)
    if isinstance(step, Pip):
        # Torch is named among the requirements, so that pip leaves it as it is, or fails.
        wanted = (*step.requirements, f"torch=={torch_version()}")
        command = pip("install", *step.args, *wanted, environment=step.environment)
        return [_command(f"install {', '.join(step.requirements)}", command)]
    return [_command(step.title, Command((sys.executable, *step.args), step.environment))]


def _command(title: str, command: Command) -> Action:
    return Action(title, (command.shell(),), lambda run: run(command))


def _built(build: Build, force: bool) -> list[Action]:
    name = f"{build.distribution} {build.version}"
    ready = None if force else cached_wheel(build)
    if ready is not None:
        return [_command(f"install {name} from the cache", _install_wheel(ready))]

    def install(run: Runner) -> None:
        wheel = cached_wheel(build)
        assert wheel is not None
        run(_install_wheel(wheel))

    minutes = f"about {build.minutes} minute{'s' if build.minutes > 1 else ''} on two cores"
    wheels = f"{wheel_directory(build)}/*.whl"
    return [
        Action(
            f"build a wheel of {name} for torch {torch_version()} ({minutes})",
            tuple(shell(build)),
            lambda run: build_wheel(build, run),
        ),
        Action(
            f"install {name} from that wheel",
            (_install_wheel(wheels).shell().replace(f"'{wheels}'", wheels),),
            install,
        ),
    ]


def _install_wheel(wheel: Path | str) -> Command:
    # Forced, because pip takes a wheel of the same version, built against another torch, for it.
    return pip("install", "--no-deps", "--no-index", "--force-reinstall", str(wheel))


def _installed(name: str) -> str | None:
    try:
        return metadata.version(re.sub(r"[-_.]+", "-", name))
    except metadata.PackageNotFoundError:
        return None
