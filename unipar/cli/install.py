"""``unipar install``."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from unipar.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from unipar.install import Recipe
    from unipar.install.plan import Action, Show
    from unipar.strategy import Strategy

Switch = Parameter(negative="")

_HEARTBEAT = 30.0


def install(
    name: str,
    *,
    extras: Annotated[tuple[str, ...], Parameter(name="--with", negative="")] = (),
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative="")] = False,
    dry_run: Annotated[bool, Switch] = False,
    force: Annotated[bool, Switch] = False,
) -> int:
    """Install the framework of a strategy, built for the torch that is here.

    Wheels that have to be built are kept in ~/.cache/unipar (or $XDG_CACHE_HOME/unipar), so the
    next environment gets them at once. Torch itself is never changed.

    Args:
        name: the strategy.
        extras: what is to be had beside the framework; may be given several times.
        yes: do not ask.
        dry_run: print the commands and run none.
        force: install what is there already, and build again what is in the cache.
    """
    from unipar.install.plan import carry_out, check, plan
    from unipar.utils.console import open_console

    strategy, recipe = _recipe(name)
    console = open_console(soft_wrap=True)
    here = not force and strategy.availability().ok
    if here and not dry_run and not extras:
        console.print(f"{recipe.framework} is here already. To install it again: --force")
        return 0
    recipe = recipe.including(extras, only=here and not dry_run)
    check(recipe)
    actions = plan(recipe, force=force)
    if dry_run:
        print("\n".join(line for action in actions for line in action.shell))
        return 0
    _show_plan(recipe, actions, console)
    if not yes and not _agreed(console):
        console.print("Nothing was done.")
        return 1
    begin = time.monotonic()
    log = carry_out(recipe.name, actions, _Progress(console, len(actions)))
    seconds = time.monotonic() - begin
    console.print(f"{recipe.framework} is installed and trains ({seconds:.0f} s). Log: {log}")
    return 0


def _recipe(name: str) -> tuple[type[Strategy], Recipe]:
    from unipar.install import Installable
    from unipar.strategy import registry

    if name not in registry.names():
        known = [
            one for one in registry.names() if issubclass(registry.strategy_class(one), Installable)
        ]
        raise ConfigError(
            f"there is no strategy '{name}' here to install the framework of. Each comes with a "
            "package of unipar's, to be installed first. In a checkout of unipar: pip install "
            "./backends/<framework>; or pip install the wheel unipar_<framework>-….whl that "
            "make dist builds there. "
            f"Here are: {', '.join(known) or 'none that needs more than torch'}."
        )
    strategy = registry.strategy_class(name)
    if not issubclass(strategy, Installable):
        raise ConfigError(f"strategy '{name}' needs nothing installed beyond its own package.")
    return strategy, strategy.recipe()


def _show_plan(recipe: Recipe, actions: list[Action], console: Console) -> None:
    from rich.text import Text

    from unipar.install.cache import torch_version

    version = ".".join(map(str, sys.version_info[:3]))
    where = f" for torch {torch_version()} and Python {version}, into {sys.prefix}:"
    console.print(Text.assemble((recipe.framework, "bold"), where))
    for number, action in enumerate(actions, 1):
        console.print(f"  {number}. {action.title}")
    if recipe.alone:
        console.print(f"  Note: {recipe.alone}.")


def _agreed(console: Console) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("there is nobody here to ask: pass --yes to go on, or --dry-run.")
    return console.input("Go on? [y/N] ", markup=False).strip().lower() in {"y", "yes"}


class _Progress:
    """One line for each action, and what it is doing while it lasts."""

    def __init__(self, console: Console, total: int) -> None:
        self._console, self._total, self._number = console, total, 0

    @contextlib.contextmanager
    def __call__(self, title: str) -> Iterator[Show]:
        self._number += 1
        label = f"[{self._number}/{self._total}] {title}"
        begin = time.monotonic()
        show = self._live(label) if self._console.is_terminal else self._plain(label)
        with show as update:
            yield update
        self._console.print(f"{label}: done, {time.monotonic() - begin:.0f} s")

    @contextlib.contextmanager
    def _live(self, label: str) -> Iterator[Show]:
        from rich.text import Text

        begin = time.monotonic()
        with self._console.status(Text(label)) as status:

            def update(line: str) -> None:
                room = max(self._console.width - 12, 20)
                seconds = time.monotonic() - begin
                head = f"{label}, {seconds:.0f} s\n"
                status.update(Text.assemble(head, (line[:room], "dim")))

            yield update

    @contextlib.contextmanager
    def _plain(self, label: str) -> Iterator[Show]:
        self._console.print(f"{label} …")
        begin = last = time.monotonic()

        def update(line: str) -> None:
            # A log that says nothing for minutes looks like a hang.
            nonlocal last
            if time.monotonic() - last >= _HEARTBEAT:
                last = time.monotonic()
                # Of a compiler's line the beginning tells how far it is.
                shown = line[: self._console.width]
                self._console.print(f"  {last - begin:.0f} s: {shown}")

        yield update
