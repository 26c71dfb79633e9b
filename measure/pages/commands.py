"""Every command and every option of the command line, from its own definitions."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cyclopts import App

from unipar.cli.app import command_line


def options_by_command() -> Iterator[tuple[str, str, list[list[str]]]]:
    """Each command, its help, and a row for each of its arguments and options."""
    for words, app in _commands(["unipar"], command_line()):
        if app.default_command is None:
            continue
        found = app.assemble_argument_collection(parse_docstring=True)
        rows = [
            [
                _names(one),
                _takes(one.hint),
                _default(one),
                " ".join((one.parameter.help or "").split()),
            ]
            for one in found
            if one.show
        ]
        yield " ".join(words), _in_code(_description(app)), rows


def page(table: Callable[[list[str], list[list[str]]], str]) -> str:
    """A section for each command.

    Args:
        table: Markdown from heads and rows.
    """
    sections = []
    for command, purpose, rows in options_by_command():
        parts = [f"## `{command}`", purpose]
        if rows:
            parts.append(table(["argument", "takes", "default", "what it does"], rows))
        sections.append("\n\n".join(parts))
    return "\n" + "\n\n".join(sections) + "\n"


def _commands(words: list[str], app: App) -> Iterator[tuple[list[str], App]]:
    yield words, app
    for name in app:
        if not name.startswith("-"):
            yield from _commands([*words, name], app[name])


def _description(app: App) -> str:
    text = app.default_command.__doc__ if callable(app.default_command) else app.help
    return (text or app.help).split("Args:")[0].strip()


def _in_code(text: str) -> str:
    """One line, options in code font: two hyphens in prose become a dash."""
    return re.sub(r"(?<![`\w-])--[a-z][a-z-]*", r"`\g<0>`", " ".join(text.split()))


def _names(argument: Any) -> str:
    names = argument.names
    if argument.field_info.is_positional:
        return f"`{names[0].lstrip('-').upper()}`"
    return ", ".join(f"`{name}`" for name in names)


def _takes(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is bool:
        return ""
    if origin is typing.Literal:
        return ", ".join(f"`{one}`" for one in arguments)
    if origin in (typing.Union, types.UnionType):
        return _takes(next(one for one in arguments if one is not type(None)))
    if origin is tuple:
        return f"{_takes(arguments[0])}, several"
    kinds = {str: "text", int: "integer", float: "number", Path: "path"}
    return kinds.get(hint) or hint.__name__


def _default(argument: Any) -> str:
    if argument.required:
        return "required"
    value = argument.field_info.default
    return "" if value in (None, (), "", False) else f"`{value}`"
