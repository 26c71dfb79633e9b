"""Reading YAML and TOML so that an error can say which line it comes from."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from unipar.errors import ConfigError
from unipar.utils.limited_yaml import UnusableYAML, compose_yaml, construct_yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

KeyPath = tuple[str | int, ...]


def parse_value(text: str) -> Any:
    """A value written on a command line or in a variable: a YAML scalar, list or mapping.

    Text that is no YAML, or none that a config can use, is taken as it is.
    """
    try:
        return construct_yaml(compose_yaml(text))
    except yaml.YAMLError:
        return text


@dataclass(frozen=True)
class Document:
    """A config file's content.

    Attributes:
        path: where it was read.
        data: its keys and values.
        lines: the line (1-based) on which each key stands, by its path from the top.
    """

    path: Path
    data: dict[str, Any]
    lines: Mapping[KeyPath, int]

    def line_of(self, key: KeyPath) -> int | None:
        """The line of ``key``, or of the nearest enclosing key that stands in the file."""
        for end in range(len(key), 0, -1):
            if key[:end] in self.lines:
                return self.lines[key[:end]]
        return None

    def where(self, key: KeyPath) -> str:
        """``"run.yaml, line 3"``."""
        line = self.line_of(key)
        return f"{self.path}, line {line}" if line else str(self.path)


def read_document(path: str | Path) -> Document:
    """Read a ``.yaml``, ``.yml`` or ``.toml`` file.

    Raises:
        ConfigError: there is no such file, its kind is unknown, or its syntax is wrong.
    """
    path = Path(path)
    readers = {".yaml": _read_yaml, ".yml": _read_yaml, ".toml": _read_toml}
    if path.suffix.lower() not in readers:
        raise ConfigError(f"{path}: a config file ends in .yaml, .yml or .toml.")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = sorted(str(p) for p in path.parent.glob("*") if p.suffix.lower() in readers)
        listed = f" There is: {', '.join(near[:8])}." if near else ""
        raise ConfigError(f"there is no config file {path}.{listed}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"the config file {path} cannot be read: {error}.") from error
    data, lines = readers[path.suffix.lower()](path, text)
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path}: a config file holds keys and values, such as `strategy: ddp`; "
            f"this one holds a {type(data).__name__}."
        )
    return Document(path, data, lines)


def _read_yaml(path: Path, text: str) -> tuple[Any, dict[KeyPath, int]]:
    try:
        node = compose_yaml(text)
        lines = dict(_yaml_lines(path, node, ()))
        return construct_yaml(node), lines
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        kind = (
            "this cannot be used" if isinstance(error, UnusableYAML) else "this is not valid YAML"
        )
        raise ConfigError(f"{path}{line}: {kind}: {error.problem}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: this is not valid YAML: {error}.") from error


def _yaml_lines(path: Path, node: yaml.Node | None, at: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in seen:
                raise ConfigError(
                    f"{path}, line {line}: '{key.value}' is already set on line {seen[key.value]}; "
                    "remove one."
                )
            seen[key.value] = line
            yield (*at, key.value), line
            yield from _yaml_lines(path, value, (*at, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*at, index), value.start_mark.line + 1
            yield from _yaml_lines(path, value, (*at, index))


def _read_toml(path: Path, text: str) -> tuple[Any, dict[KeyPath, int]]:
    try:
        return tomllib.loads(text), dict(_toml_lines(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: this is not valid TOML: {error}.") from error
    except RecursionError as error:
        raise ConfigError(
            f"{path}: this cannot be used: its arrays are nested too deeply."
        ) from error
    except ValueError as error:
        # What Python says of a number that it would take long to read.
        raise ConfigError(
            f"{path}: this cannot be used: a number has thousands of digits."
        ) from error


_TOML_TABLE = re.compile(r"^\s*\[{1,2}([^\[\]]+)\]{1,2}\s*(?:#.*)?$")
_TOML_KEY = re.compile(r"""^\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"))*)\s*=""")
_TOML_INLINE_KEY = re.compile(r"[{,]\s*([\w-]+)\s*=")


def _toml_lines(text: str) -> Iterator[tuple[KeyPath, int]]:
    # tomllib keeps no positions; keys of one line are found again by their shape.
    table: KeyPath = ()
    for number, line in enumerate(text.splitlines(), 1):
        if match := _TOML_TABLE.match(line):
            table = _toml_path(match[1])
            yield table, number
        elif match := _TOML_KEY.match(line):
            key = (*table, *_toml_path(match[1]))
            yield key, number
            for inline in _TOML_INLINE_KEY.finditer(line, match.end()):
                yield (*key, inline[1]), number


def _toml_path(text: str) -> KeyPath:
    return tuple(part.strip().strip("\"'") for part in text.split("."))
