"""Turning pydantic's validation errors into one message that says what to change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError, to_jsonable_python

from unipar.errors import ConfigError, did_you_mean
from unipar.utils.documents import KeyPath
from unipar.utils.limited_yaml import MAX_DEPTH, MAX_VALUES

_MOST_SHOWN = 8
_NAMES_SHOWN = 40
_MAX_BITS = 63


def check_plain(
    values: Mapping[str, Any], subject: str, where: Callable[[KeyPath], str] = lambda key: ""
) -> None:
    """Refuse mappings and lists that hold themselves, and numbers that cannot be meant.

    Args:
        values: by key, before they are validated.
        subject: what they are for, such as ``"this run"``.
        where: tells the source of a key, such as a file and line, or an empty string.

    Raises:
        ConfigError: they nest too deeply, or hold too many values or too long a number.
    """
    waiting: list[tuple[KeyPath, Any]] = [((), values)]
    seen = 0
    while waiting:
        key, value = waiting.pop()
        seen += 1
        problem = ""
        if isinstance(value, int) and value.bit_length() > _MAX_BITS:
            problem = f"a whole number of at most {2**_MAX_BITS - 1} is allowed, and this is larger"
        elif len(key) > MAX_DEPTH:
            problem = f"lists and mappings are nested more than {MAX_DEPTH} deep, or in themselves"
        elif seen > MAX_VALUES:
            problem = f"there are more than {MAX_VALUES:,} values"
        if problem:
            place = where(key[:1]) if key else ""
            said = f"{place}: {dotted(key[:1])}" if place else dotted(key[:1])
            raise ConfigError(f"{subject}: {said}: {problem}.")
        if isinstance(value, Mapping):
            waiting.extend(((*key, name), item) for name, item in value.items())
        elif isinstance(value, (list, tuple)):
            waiting.extend(((*key, index), item) for index, item in enumerate(value))


def refuse_objects(values: Mapping[str, Any], instead: str) -> None:
    """Refuse values that a run's ``config.yaml`` cannot hold.

    Args:
        values: by key.
        instead: how such a value is given.

    Raises:
        ValueError: there is one.
    """
    for key, value in values.items():
        try:
            to_jsonable_python(value)
        except PydanticSerializationError as error:
            raise ValueError(
                f"{key}: {value!r:.60} ({type(value).__name__}) is no plain value, as the "
                f"config.yaml of a run holds. {instead}"
            ) from error


def config_error(
    error: ValidationError,
    model: type[BaseModel],
    given: Mapping[str, Any],
    *,
    subject: str,
    where: Callable[[KeyPath], str] = lambda key: "",
) -> ConfigError:
    """Say of every problem which key it is in, what was given and what is allowed.

    Args:
        error: what pydantic raised.
        model: the model that was validated.
        given: the values it was given.
        subject: what was being read, such as ``"strategy 'fsdp'"``.
        where: tells the source of a key, such as a file and line, or an empty string.
    """
    schema = model.model_json_schema()
    listed: set[KeyPath] = set()
    problems: dict[tuple[KeyPath, str], str] = {}
    for item in error.errors():
        key, value = _follow(item["loc"], given)
        kind = item["type"]
        if kind == "extra_forbidden":
            problems[key, kind] = _unknown_key(schema, key, listed)
        elif kind == "missing":
            missing = (*key, item["loc"][-1])
            problems[missing, kind] = f"'{dotted(missing)}' is missing."
        elif kind == "invalid_key" or item["loc"][-1:] == ("[key]",):
            text = f"{item['input']!r} ({type(item['input']).__name__}) is no key. Keys are text."
            problems[key, text] = f"{dotted(key)}: {text}" if key else text
        elif kind == "value_error":
            text = str(item.get("ctx", {}).get("error", item["msg"]))
            problems[key, text] = f"{dotted(key)}: {text}" if key else text
        else:
            # A union reports each of its branches; the key's schema says them all at once.
            problems.setdefault((key, "value"), _bad_value(schema, key, value, item["msg"]))
    lines = []
    for (key, kind), text in problems.items():
        if kind == "value" and any(_encloses(key, other) for other, _ in problems):
            continue  # The branch of a union that nobody meant.
        place = where(key) if key else ""
        lines.append(f"{place}: {text}" if place else text)
    if len(lines) == 1:
        return ConfigError(f"{subject}: {lines[0]}")
    hidden = len(lines) - _MOST_SHOWN
    shown = [f"  - {line}" for line in lines[:_MOST_SHOWN]]
    if hidden > 0:
        shown.append(f"  and {hidden} more.")
    return ConfigError("\n".join([f"{subject}: {len(lines)} problems.", *shown]))


def dotted(key: KeyPath) -> str:
    """``("checkpoint", "keep_last")`` as ``"checkpoint.keep_last"``."""
    return ".".join(str(part) for part in key)


def _encloses(key: KeyPath, other: KeyPath) -> bool:
    return len(other) > len(key) and other[: len(key)] == key


def _follow(loc: KeyPath, given: Any) -> tuple[KeyPath, Any]:
    # pydantic's location also names union branches and validators, which are not keys.
    key: list[str | int] = []
    value = given
    for part in loc:
        if _has(value, part):
            value = value[part]
            key.append(part)
    return tuple(key), value


def _has(value: Any, part: str | int) -> bool:
    if isinstance(value, (list, tuple)):
        return isinstance(part, int) and part < len(value)
    return isinstance(value, Mapping) and part in value


def _unknown_key(schema: dict[str, Any], key: KeyPath, listed: set[KeyPath]) -> str:
    parent = key[:-1]
    names = sorted(name for one in _at(schema, parent) for name in one.get("properties", {}))
    allowed = f" Allowed: {_listing(names)}." if names else " None is allowed here."
    if parent in listed:  # Said once; a screen has room for no more.
        allowed = ""
    listed.add(parent)
    return f"unknown key '{dotted(key)}'.{did_you_mean(str(key[-1]), names)}{allowed}"


def _bad_value(schema: dict[str, Any], key: KeyPath, value: Any, fallback: str) -> str:
    branches = _at(schema, key)
    allowed = list(dict.fromkeys(text for branch in branches for text in _allowed(branch)))
    words = [str(v) for branch in branches for v in branch.get("enum", [branch.get("const")]) if v]
    near = did_you_mean(value, words) if isinstance(value, str) else ""
    shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "…"
    said = f" Allowed: {_either(allowed)}." if allowed else f" {fallback}."
    return f"{dotted(key)}: {shown} was given.{said}{near}"


def _at(schema: dict[str, Any], key: KeyPath) -> list[dict[str, Any]]:
    """The schema's branches that describe ``key``, references and unions resolved."""
    found = _branches(schema, schema)
    for part in key:
        found = [
            branch
            for parent in found
            for child in _children(parent, part)
            for branch in _branches(child, schema)
        ]
    return found


def _children(parent: dict[str, Any], part: str | int) -> list[dict[str, Any]]:
    if isinstance(part, int):
        return [parent["items"]] if isinstance(parent.get("items"), dict) else []
    if part in parent.get("properties", {}):
        return [parent["properties"][part]]
    extra = parent.get("additionalProperties")
    return [extra] if isinstance(extra, dict) else []


def _branches(part: dict[str, Any], schema: dict[str, Any]) -> list[dict[str, Any]]:
    if "$ref" in part:
        return _branches(schema["$defs"][part["$ref"].rsplit("/", 1)[1]], schema)
    unions = [*part.get("anyOf", []), *part.get("oneOf", [])]
    return [found for one in unions for found in _branches(one, schema)] if unions else [part]


def _allowed(branch: dict[str, Any]) -> list[str]:
    if "enum" in branch:
        return [_literal(value) for value in branch["enum"]]
    if "const" in branch:
        return [_literal(branch["const"])]
    if "examples" in branch:
        return [f"text like {example!r}" for example in branch["examples"][:1]]
    kind = branch.get("type")
    if kind in ("integer", "number"):
        return [("a whole number" if kind == "integer" else "a number") + _bounds(branch)]
    if kind == "boolean":
        return ["true", "false"]
    if kind == "array":
        return [
            "a list of " + {"string": "names"}.get(branch.get("items", {}).get("type"), "values")
        ]
    if kind == "object":
        names = sorted(branch.get("properties", {}))
        return [f"a mapping with {_listing(names)}" if names else "a mapping"]
    return {
        "string": ["a path" if branch.get("format") == "path" else "text"],
        "null": ["null"],
    }.get(str(kind), [])


def _literal(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _bounds(branch: dict[str, Any]) -> str:
    words = {
        "minimum": "of at least",
        "exclusiveMinimum": "above",
        "maximum": "of at most",
        "exclusiveMaximum": "below",
    }
    said = [f"{text} {branch[key]:g}" for key, text in words.items() if key in branch]
    return " " + " and ".join(said) if said else ""


def _listing(names: list[str]) -> str:
    more = f", … ({len(names) - _NAMES_SHOWN} more)" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


def _either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
