"""Finding strategies by entry point, and making one from what a user wrote.

A distribution offers a strategy in the entry-point group ``unipar.strategies``:

.. code-block:: toml

    [project.entry-points."unipar.strategies"]
    mine = "my_package.strategy:MyStrategy"

No strategy is imported until it is asked for by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from pydantic import ValidationError

from unipar.errors import ConfigError, did_you_mean
from unipar.strategy import Availability, Capabilities, Strategy, StrategyOptions
from unipar.utils.documents import KeyPath, parse_value
from unipar.utils.validation import check_plain, config_error
from unipar.world import Placement

GROUP = "unipar.strategies"
AUTO = "auto"

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
    return sorted({point.name for point in metadata.entry_points(group=GROUP)})


def strategy_class(name: str) -> type[Strategy]:
    """Import the strategy called ``name``, and nothing else.

    Raises:
        ConfigError: no distribution, or more than one, offers it; or it fails to import.
    """
    point = _entry_point(name)
    try:
        found = point.load()
    except Exception as error:
        raise ConfigError(
            f"strategy '{name}' of {_distribution(point)} fails to import from '{point.value}': "
            f"{type(error).__name__}: {error}. Reinstall or upgrade that distribution."
        ) from error
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        raise ConfigError(
            f"strategy '{name}' of {_distribution(point)}: '{point.value}' is no subclass of "
            "unipar.Strategy."
        )
    return found


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
        raise ConfigError(f"strategy 'auto' needs a run to choose for; name one of {_installed()}.")
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
    subject = f"strategy '{name}'"
    check_plain(options, subject, where)
    try:
        return found(found.options_type.model_validate(dict(options)))
    except ValidationError as error:
        raise config_error(
            error, found.options_type, options, subject=subject, where=where
        ) from error


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
    if isinstance(strategy, str):
        return _parse_inline(strategy)
    if isinstance(strategy, Mapping):
        if not isinstance(strategy.get("name"), str):
            raise ConfigError(
                f"strategy {dict(strategy)!r} has no name: "
                "write {'name': 'fsdp', …}. Installed: " + _installed() + "."
            )
        return dict(strategy)
    raise ConfigError(
        f"strategy {strategy!r} ({type(strategy).__name__}) was given. Allowed: a name, "
        f"'name:option=value,…', a mapping with 'name', or an options object. "
        f"Installed: {_installed()}."
    )


def inline(strategy: str | Mapping[str, Any] | StrategyOptions) -> str:
    """Return what was written, as ``name:option=value,…``; the options are not validated.

    Raises:
        ConfigError: as :func:`as_mapping`.
    """
    options = as_mapping(strategy)
    name = options.pop("name")
    items = ",".join(f"{key}={_written(value)}" for key, value in options.items())
    return f"{name}:{items}" if items else name


def _written(value: Any) -> str:
    """A value as :func:`parse_value` reads it back."""
    if isinstance(value, str) and value.isidentifier() and parse_value(value) == value:
        return value
    return json.dumps(value)


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


def split(text: str, at: str = ",") -> list[str]:
    """Split at the separators that are inside no bracket and no quote."""
    parts, depth, quote, start = [], 0, "", 0
    for place, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "[{(":
            depth += 1
        elif char in "]})":
            depth -= 1
        elif char == at and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [*parts, text[start:]]


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
        point = _entry_point(name)
    except ConfigError as error:
        return StrategyInfo(name, "", Availability(False, str(error)), None)
    distribution = _distribution(point)
    try:
        found = strategy_class(name)
    except ConfigError as error:
        remedy = f"pip install --force-reinstall {_distribution(point, version=False)}"
        return StrategyInfo(name, distribution, Availability(False, str(error), remedy), None)
    try:
        capabilities = found(found.options_type()).capabilities()
    except ValidationError:
        # Some option has no default, so there is no such thing as its default capabilities.
        capabilities = None
    return StrategyInfo(name, distribution, found.availability(), capabilities)


def _entry_point(name: str) -> metadata.EntryPoint:
    # One distribution may be seen twice (an editable install beside its build metadata).
    found = {
        (_distribution(point, version=False), point.value): point
        for point in metadata.entry_points(group=GROUP)
        if point.name == name
    }
    if not found:
        known = [*names(), AUTO]
        raise ConfigError(
            f"there is no strategy '{name}'.{did_you_mean(name, known)} Installed: {_installed()}. "
            "A strategy of another framework comes with that framework's own unipar package."
        )
    if len(found) > 1:
        owners = " and ".join(sorted(f"{_distribution(p)} ({p.value})" for p in found.values()))
        raise ConfigError(
            f"strategy '{name}' is offered by {owners}; uninstall all but one of them."
        )
    return next(iter(found.values()))


def _distribution(point: metadata.EntryPoint, *, version: bool = True) -> str:
    if point.dist is None:
        return "an unknown distribution"
    return f"{point.dist.name} {point.dist.version}" if version else point.dist.name


def _installed() -> str:
    return ", ".join([*names(), AUTO])


def _parse_inline(text: str) -> dict[str, Any]:
    name, colon, rest = text.partition(":")
    parsed: dict[str, Any] = {"name": name.strip()}
    for item in split(rest) if colon else []:
        key, equals, value = item.partition("=")
        key = key.strip()
        if not equals or not key.isidentifier():
            raise ConfigError(
                f"strategy '{text}': '{item.strip()}' is not option=value. "
                "Write it like 'fsdp:sharding=hybrid,cpu_offload=true'."
            )
        if key in parsed:
            raise ConfigError(f"strategy '{text}': '{key}' is given twice; remove one.")
        parsed[key] = parse_value(value.strip())
    return parsed
