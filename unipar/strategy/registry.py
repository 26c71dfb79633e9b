"""Finding strategies by entry point, and making one from what a user wrote.

A distribution offers a strategy in the entry-point group ``unipar.strategies``:

.. code-block:: toml

    [project.entry-points."unipar.strategies"]
    mine = "my_package.strategy:MyStrategy"

No strategy is imported until it is asked for by name.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from pydantic import ValidationError

from unipar.errors import ConfigError
from unipar.strategy import Availability, Capabilities, Strategy, StrategyOptions
from unipar.utils import plugins
from unipar.utils.documents import KeyPath
from unipar.utils.plugins import Plugins, distribution
from unipar.world import Placement

GROUP = "unipar.strategies"
AUTO = "auto"

STRATEGIES = Plugins(
    group=GROUP,
    kind="strategy",
    base=(Strategy, "unipar.Strategy"),
    example="fsdp:sharding=hybrid,cpu_offload=true",
    elsewhere=("A strategy of another framework comes with that framework's own unipar package."),
    words=(AUTO,),
)
"""The strategies that are installed."""

_REQUIRED = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class StrategyInfo:
    """An installed strategy, as ``unipar doctor`` lists it.

    Attributes:
        name: its registered name.
        distribution: the installed distribution that offers it, with its version.
        availability: whether it can run here, and what is missing if not.
        capabilities: what it can do with its default options; ``None`` when it cannot say.
    """

    name: str
    distribution: str
    availability: Availability
    capabilities: Capabilities | None


def names() -> list[str]:
    """The names of all installed strategies, sorted; imports none of them."""
    return STRATEGIES.names()


def strategy_class(name: str) -> type[Strategy]:
    """Import the strategy called ``name``, and nothing else.

    Raises:
        ConfigError: no distribution, or more than one, offers it; or it fails to import.
    """
    return STRATEGIES.load(name)


def resolve(strategy: str | Mapping[str, Any] | StrategyOptions) -> Strategy:
    """Make the strategy that was asked for by name.

    Args:
        strategy: a name (``"fsdp"``), a name with options (``"fsdp:sharding=hybrid"``), a mapping
            (``{"name": "fsdp", "sharding": "hybrid"}``), or an options object.

    Raises:
        ConfigError: there is no such strategy or option; or it is ``"auto"``, which
            :func:`unipar.sizing.resolve_for` knows.
    """
    if isinstance(strategy, StrategyOptions):
        return strategy_class(type(strategy).strategy)(strategy)
    if is_auto(strategy):
        raise ConfigError(
            f"strategy 'auto' needs a run to choose for; name one of {STRATEGIES.installed()}."
        )
    wanted = as_mapping(strategy)
    return make(wanted.pop("name"), wanted)


def is_auto(strategy: str | Mapping[str, Any] | StrategyOptions) -> bool:
    """Return whether the choice is left to ``"auto"``.

    Raises:
        ConfigError: it is, with options.
    """
    if isinstance(strategy, StrategyOptions):
        return False
    wanted = as_mapping(strategy)
    if wanted.pop("name") != AUTO:
        return False
    if wanted:
        raise ConfigError(
            f"strategy 'auto' takes no options ({', '.join(map(str, wanted))} given): "
            "options belong to a strategy that is named."
        )
    return True


def make(
    name: str, options: Mapping[str, Any], *, where: Callable[[KeyPath], str] = lambda key: ""
) -> Strategy:
    """Make the strategy ``name`` from options not yet validated.

    Args:
        name: its registered name.
        options: its options.
        where: tells where an option was set, such as a file and line, or an empty string.

    Raises:
        ConfigError: there is no such strategy, or an option is unknown or has a wrong value.
    """
    found = strategy_class(name)
    return found(STRATEGIES.options(name, found.options_type, options, where=where))


def for_engine(strategy: Strategy, options: Mapping[str, Any]) -> Strategy:
    """A run's strategy with other options for one engine.

    Args:
        strategy: of the run.
        options: what differs, not yet validated.

    Raises:
        ConfigError: an option is the whole run's, is unknown or has a wrong value.
    """
    if not options:
        return strategy
    others = sorted(options.keys() - strategy.engine_options)
    if others:
        own = ", ".join(sorted(strategy.engine_options)) or "none"
        raise ConfigError(
            f"an engine has no {', '.join(others)} of its own: of the options of strategy "
            f"'{strategy.name}' each engine may have its own of {own}. Give the session the others."
        )
    given = as_mapping(strategy.options)
    del given["name"]
    # With what setup() has left in it.
    made = copy.copy(strategy)
    made.options = STRATEGIES.options(strategy.name, strategy.options_type, {**given, **options})
    return made


def as_mapping(strategy: str | Mapping[str, Any] | StrategyOptions) -> dict[str, Any]:
    """Return what was written, as ``{"name": …, **options}``; the options are not validated.

    Raises:
        ConfigError: it has no name, or an inline option is not ``key=value``.
    """
    if isinstance(strategy, StrategyOptions):
        return {
            "name": type(strategy).strategy,
            **strategy.model_dump(mode="json", exclude_unset=True),
        }
    return STRATEGIES.as_mapping(strategy)


def inline(strategy: str | Mapping[str, Any] | StrategyOptions) -> str:
    """Return what was written, as ``name:option=value,…``; the options are not validated.

    Raises:
        ConfigError: as :func:`as_mapping`.
    """
    return plugins.inline(as_mapping(strategy))


def versions(name: str) -> dict[str, str]:
    """Of the distribution that offers a strategy, and of what that one needs besides torch's."""
    found = {}
    for point in metadata.entry_points(group=GROUP, name=name):
        if point.dist is None:
            continue
        required = [line for line in point.dist.requires or [] if "extra ==" not in line]
        own = point.dist.name != "unipar"
        for package in (point.dist.name, "torch", *(map(_package, required) if own else ())):
            try:
                found[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                continue
    return found


def _package(requirement: str) -> str:
    match = _REQUIRED.match(requirement)
    return match.group() if match else requirement


def table() -> list[StrategyInfo]:
    """Every installed strategy, whether it can run here, and what it can do."""
    return [_info(name) for name in names()]


def keeping_tensors_whole(placement: Placement) -> list[str]:
    """The strategies that can run there and give optimizers whole tensors."""
    return [
        info.name
        for info in table()
        if info.availability.ok and (able := info.capabilities) and not able.splits_tensors
        if placement.device_type in able.device_types
        and placement.size <= (able.max_devices or placement.size)
    ]


def _info(name: str) -> StrategyInfo:
    try:
        point = STRATEGIES.entry_point(name)
    except ConfigError as error:
        return StrategyInfo(name, "", Availability(False, str(error)), None)
    offered_by = distribution(point)
    try:
        found = strategy_class(name)
    except ConfigError as error:
        remedy = f"pip install --force-reinstall {distribution(point, version=False)}"
        return StrategyInfo(name, offered_by, Availability(False, str(error), remedy), None)
    try:
        capabilities = found(found.options_type()).capabilities()
    except ValidationError:
        # Some option has no default, so there is no such thing as its default capabilities.
        capabilities = None
    return StrategyInfo(name, offered_by, found.availability(), capabilities)
