"""The JSON Schema of run files."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from unipar.config.runfile import Groups, NamedGroup, RunFile, TargetGroup
from unipar.errors import ConfigError
from unipar.launchers import LauncherOptions
from unipar.launchers.registry import LAUNCHERS
from unipar.optimizers.named import OPTIMIZERS, SCHEDULERS
from unipar.strategy import StrategyOptions, registry

_SHORT_FORMS: dict[str, dict[str, Any]] = {
    "optimizer": {"enum": sorted(OPTIMIZERS)},
    "lr_scheduler": {"enum": sorted(SCHEDULERS)},
    "checkpoint": {"type": ["string", "boolean"], "description": "The directory, or on and off."},
    "activation_checkpointing": {"type": ["string", "boolean"]},
    "loggers": {"type": "string"},
}
"""What validation takes beside the form that pydantic describes."""


def run_schema() -> dict[str, Any]:
    """Describe run files, with the options of each strategy that is installed.

    A strategy that fails to import is offered by name, its options left open.
    """
    options: dict[str, type[BaseModel] | None] = {}
    for name in registry.names():
        try:
            options[name] = registry.strategy_class(name).options_type
        except ConfigError:
            options[name] = None
    models = [RunFile, *(model for model in options.values() if model is not None)]
    references, schemas = models_json_schema([(model, "validation") for model in models])
    definitions = schemas["$defs"]
    names = {model: references[model, "validation"]["$ref"].rsplit("/", 1)[1] for model in models}
    by_model = {model: definitions.pop(names[model]) for model in models}
    run = by_model[RunFile]
    definitions.pop(StrategyOptions.__name__, None)  # Stands in for all of them.
    strategies = [
        _named(name, by_model[model] if model else None) for name, model in options.items()
    ]
    inline = {"type": "string", "pattern": f"^({'|'.join(options)}):.+=.+$"}
    _replace(run, "strategy", [{"enum": [*options, registry.AUTO]}, inline, *strategies])
    _offer_launchers(run, definitions)
    for key in _SHORT_FORMS:
        _offer_short(run, key)
    groups = definitions[Groups.__name__]["additionalProperties"]
    groups["anyOf"] = groups.pop("oneOf")
    for group in (NamedGroup, TargetGroup):
        _offer_short(definitions[group.__name__], "lr_scheduler")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **run,
        "title": "unipar run file",
        "$defs": definitions,
    }


def _offer_launchers(run: dict[str, Any], definitions: dict[str, Any]) -> None:
    """Describe the options of each launcher that is installed."""
    definitions.pop(LauncherOptions.__name__, None)  # Stands in for all of them.
    forms: list[dict[str, Any]] = []
    found = LAUNCHERS.names()
    for name in found:
        try:
            described = LAUNCHERS.load(name).options_type.model_json_schema()
        except ConfigError:
            forms.append(_named(name, None))
            continue
        definitions.update(described.pop("$defs", {}))
        forms.append(_named(name, described))
    inline = {"type": "string", "pattern": f"^({'|'.join(found)}):.+=.+$"}
    _replace(run, "launcher", [{"enum": found}, inline, *forms])


_NOTES = ("default", "description", "title")


def _offer_short(described: dict[str, Any], key: str) -> None:
    field = described["properties"][key]
    # Any form, not exactly one: an optimizer's arguments could be a target's too.
    forms = field.get("oneOf") or field.get("anyOf") or [_without_notes(field)]
    _replace(described, key, [_SHORT_FORMS[key], *forms])


def _replace(run: dict[str, Any], key: str, forms: list[dict[str, Any]]) -> None:
    field = run["properties"][key]
    notes = {note: field[note] for note in _NOTES if note in field}
    run["properties"][key] = {**notes, "anyOf": forms}


def _without_notes(field: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in field.items() if key not in _NOTES}


def _named(name: str, options: dict[str, Any] | None) -> dict[str, Any]:
    form = {**options} if options else {"type": "object", "additionalProperties": True}
    form["properties"] = {"name": {"const": name}, **form.get("properties", {})}
    form["required"] = ["name", *form.get("required", [])]
    return form
