"""The JSON Schema of run files."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from unipar import registry
from unipar.errors import ConfigError
from unipar.runfile import RunFile


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

    def take(model: type[BaseModel]) -> dict[str, Any]:
        return definitions[references[model, "validation"]["$ref"].rsplit("/", 1)[1]]

    run = take(RunFile)
    field = run["properties"]["strategy"]
    names = [*options, registry.AUTO]
    run["properties"]["strategy"] = {
        "default": field["default"],
        "description": field["description"],
        "anyOf": [
            {"enum": names},
            {"type": "string", "pattern": f"^({'|'.join(options)}):.+=.+$"},
            *(_named(name, take(model) if model else None) for name, model in options.items()),
        ],
    }
    used = {**definitions}
    for model in [*models]:
        used.pop(references[model, "validation"]["$ref"].rsplit("/", 1)[1], None)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **run,
        "title": "unipar run file",
        "$defs": used,
    }


def _named(name: str, options: dict[str, Any] | None) -> dict[str, Any]:
    form = {**options} if options else {"type": "object", "additionalProperties": True}
    form["properties"] = {"name": {"const": name}, **form.get("properties", {})}
    form["required"] = ["name", *form.get("required", [])]
    return form
