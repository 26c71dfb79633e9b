"""Classes that distributions offer by entry point, and what users write to name one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from unipar.errors import ConfigError, did_you_mean
from unipar.utils.documents import KeyPath, parse_value
from unipar.utils.validation import check_plain, config_error

T = TypeVar("T")


@dataclass(frozen=True)
class Plugins(Generic[T]):
    """The classes of one kind; each is imported when it is asked for by name, and no other.

    Attributes:
        group: the entry-point group in which distributions offer them.
        kind: what one is called, such as ``"strategy"``.
        base: the class that all of them derive from, with its public name.
        example: options as one may write them, for messages.
        elsewhere: a sentence on where more of them come from.
        words: names that stand for none of them.
    """

    group: str
    kind: str
    base: tuple[type[T], str]
    example: str
    elsewhere: str
    words: Sequence[str] = ()

    def names(self) -> list[str]:
        """The names of all that are installed, sorted; imports none of them."""
        return sorted({point.name for point in metadata.entry_points(group=self.group)})

    def installed(self) -> str:
        """The names that may be written, for messages."""
        return ", ".join([*self.names(), *self.words])

    def load(self, name: str) -> type[T]:
        """Import the class called ``name``, and nothing else.

        Raises:
            ConfigError: no distribution, or more than one, offers it; or it fails to import.
        """
        point = self.entry_point(name)
        try:
            found = point.load()
        except Exception as error:
            raise ConfigError(
                f"{self.kind} '{name}' of {distribution(point)} fails to import from "
                f"'{point.value}': {type(error).__name__}: {error}. Reinstall or upgrade that "
                "distribution."
            ) from error
        base, public = self.base
        if not (isinstance(found, type) and issubclass(found, base)):
            raise ConfigError(
                f"{self.kind} '{name}' of {distribution(point)}: '{point.value}' is no subclass of "
                f"{public}."
            )
        return found

    def options(
        self,
        name: str,
        options_type: type[BaseModel],
        options: Mapping[str, Any],
        *,
        where: Callable[[KeyPath], str] = lambda key: "",
    ) -> Any:
        """Validate the options of the one called ``name``.

        Args:
            name: its registered name.
            options_type: the type of its options.
            options: by key.
            where: tells where an option was set, such as a file and line, or an empty string.

        Raises:
            ConfigError: an option is unknown or has a wrong value.
        """
        subject = f"{self.kind} '{name}'"
        check_plain(options, subject, where)
        try:
            return options_type.model_validate(dict(options))
        except ValidationError as error:
            raise config_error(
                error, options_type, options, subject=subject, where=where
            ) from error

    def as_mapping(self, written: str | Mapping[str, Any]) -> dict[str, Any]:
        """Return what was written, as ``{"name": …, **options}``; the options are not validated.

        Raises:
            ConfigError: it has no name, or an inline option is not ``key=value``.
        """
        if isinstance(written, str):
            return self._parse_inline(written)
        if isinstance(written, Mapping):
            if not isinstance(written.get("name"), str):
                raise ConfigError(
                    f"{self.kind} {dict(written)!r} has no name: write "
                    f"{{'name': '{self.names()[0]}', …}}. Installed: {self.installed()}."
                )
            return dict(written)
        raise ConfigError(
            f"{self.kind} {written!r} ({type(written).__name__}) was given. Allowed: a name, "
            f"'name:option=value,…', a mapping with 'name', or an options object. "
            f"Installed: {self.installed()}."
        )

    def entry_point(self, name: str) -> metadata.EntryPoint:
        """Find who offers ``name``.

        Raises:
            ConfigError: no distribution does, or more than one.
        """
        # One distribution may be seen twice (an editable install beside its build metadata).
        found = {
            (distribution(point, version=False), point.value): point
            for point in metadata.entry_points(group=self.group)
            if point.name == name
        }
        if not found:
            known = [*self.names(), *self.words]
            raise ConfigError(
                f"there is no {self.kind} '{name}'.{did_you_mean(name, known)} Installed: "
                f"{self.installed()}. {self.elsewhere}"
            )
        if len(found) > 1:
            owners = " and ".join(sorted(f"{distribution(p)} ({p.value})" for p in found.values()))
            raise ConfigError(
                f"{self.kind} '{name}' is offered by {owners}; uninstall all but one of them."
            )
        return next(iter(found.values()))

    def _parse_inline(self, text: str) -> dict[str, Any]:
        name, colon, rest = text.partition(":")
        parsed: dict[str, Any] = {"name": name.strip()}
        for item in split(rest) if colon else []:
            key, equals, value = item.partition("=")
            key = key.strip()
            if not equals or not key.isidentifier():
                raise ConfigError(
                    f"{self.kind} '{text}': '{item.strip()}' is not option=value. "
                    f"Write it like '{self.example}'."
                )
            if key in parsed:
                raise ConfigError(f"{self.kind} '{text}': '{key}' is given twice; remove one.")
            parsed[key] = parse_value(value.strip())
        return parsed


def inline(written: Mapping[str, Any]) -> str:
    """Return ``{"name": …, **options}`` as ``name:option=value,…``."""
    options = dict(written)
    name = options.pop("name")
    items = ",".join(f"{key}={_written(value)}" for key, value in options.items())
    return f"{name}:{items}" if items else name


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


def distribution(point: metadata.EntryPoint, *, version: bool = True) -> str:
    """The distribution that offers an entry point, for messages."""
    if point.dist is None:
        return "an unknown distribution"
    return f"{point.dist.name} {point.dist.version}" if version else point.dist.name


def _written(value: Any) -> str:
    """A value as :func:`parse_value` reads it back."""
    if isinstance(value, str) and value.isidentifier() and parse_value(value) == value:
        return value
    return json.dumps(value)
