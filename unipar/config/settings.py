"""The sources of a run's settings: a file, the environment, flags; later ones win."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unipar.config import holds, validate
from unipar.config.import_paths import make_importable
from unipar.config.merging import merge, set_dotted
from unipar.config.runfile import RunFile
from unipar.errors import ConfigError
from unipar.launchers import registry as launchers
from unipar.strategy import registry
from unipar.utils.documents import Document, KeyPath, parse_value, read_document

ENV_PREFIX = "UNIPAR_"


@dataclass(frozen=True)
class Layer:
    """Settings of one source.

    Attributes:
        values: the settings.
        origins: what each was written as, by key: ``UNIPAR_STEPS``, ``--steps``, ``--set steps``.
    """

    values: Mapping[str, Any]
    origins: Mapping[KeyPath, str]

    def where(self, key: KeyPath) -> str | None:
        """Return what set ``key`` here; ``None`` where this source does not set it.

        An option that is written inline (``slurm:partition=gpu``) is set where the whole is.
        """
        if not holds(self.values, key):
            inline = next(self._inline(key), None)
            return None if inline is None else self.where(inline)
        for end in range(len(key), 0, -1):
            if key[:end] in self.origins:
                return self.origins[key[:end]]
        # Set only in part: what set the first part of it.
        return next((name for one, name in self.origins.items() if one[: len(key)] == key), None)

    def _inline(self, key: KeyPath) -> Iterator[KeyPath]:
        """The beginning of a key that has text here, in which the rest may be written."""
        values: Any = self.values
        for depth, name in enumerate(key[:-1], start=1):
            values = values.get(name) if isinstance(values, Mapping) else None
            if isinstance(values, str):
                yield key[:depth]


@dataclass(frozen=True)
class Settings:
    """A run as its sources give it together.

    Attributes:
        run: the validated run.
        document: the file.
        layers: the environment and the flags, the one that wins last.
    """

    run: RunFile
    document: Document
    layers: tuple[Layer, ...]

    def where(self, key: KeyPath) -> str:
        """Return what set ``key``: a flag, a variable, or a file and line."""
        return _where(key, self.document, self.layers)


def load_settings(
    path: str | Path,
    *,
    flags: Mapping[str, Any] | None = None,
    sets: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Read a run file and lay the environment and the flags over it.

    The file's directory and the current one become importable, for the import paths in the file.

    Args:
        path: the YAML or TOML file.
        flags: fields by name; ``None`` is a flag that was not given.
        sets: ``key.sub=value``, the values in YAML.
        environ: the environment variables; left out: this process's own.

    Raises:
        ConfigError: every wrong key and value, with file and line, variable or flag.
    """
    document = read_document(path)
    layers = (
        read_environment(os.environ if environ is None else environ),
        read_flags(flags or {}, sets),
    )
    values: dict[str, Any] = document.data
    for layer in layers:
        values = merge(values, layer.values)
    run = validate(RunFile, values, where=lambda key: _where(key, document, layers))
    _check_strategy(run, lambda key: _where(("strategy", *key), document, layers))
    launchers.resolve(run.launcher, where=lambda key: _where(("launcher", *key), document, layers))
    make_importable([document.path.parent, Path.cwd()])
    return Settings(run, document, layers)


def read_environment(environ: Mapping[str, str]) -> Layer:
    """Settings from variables: ``UNIPAR_STEPS=10``, ``UNIPAR_CHECKPOINT__KEEP_LAST=3``.

    ``__`` goes one level down; values are YAML. Names are taken in lower case, but a level that
    is not all upper case keeps its own (``UNIPAR_LR_SCHEDULER__T_max``).
    """
    values: dict[str, Any] = {}
    origins: dict[KeyPath, str] = {}
    # Sorted, so that a variable comes before those that go deeper into the same key.
    for name in sorted(environ):
        if not name.startswith(ENV_PREFIX):
            continue
        parts = name[len(ENV_PREFIX) :].split("__")
        key = tuple(part.lower() if part.isupper() else part for part in parts)
        try:
            set_dotted(values, ".".join(key), parse_value(environ[name]))
        except ConfigError as error:
            raise ConfigError(f"environment variable {name}: {error}") from error
        origins[key] = f"environment variable {name}"
    return Layer(values, origins)


def read_flags(flags: Mapping[str, Any], sets: Sequence[str]) -> Layer:
    """Settings from flags and from ``--set key.sub=value``; of equal keys the last ``--set`` wins.

    Raises:
        ConfigError: a ``--set`` is not ``key=value``.
    """
    values = {key: value for key, value in flags.items() if value is not None}
    origins: dict[KeyPath, str] = {(key,): f"--{key.replace('_', '-')}" for key in values}
    for item in sets:
        key, equals, text = item.partition("=")
        key = key.strip()
        if not equals:
            raise ConfigError(f"--set {item}: write it like --set checkpoint.keep_last=3.")
        try:
            set_dotted(values, key, parse_value(text))
        except ConfigError as error:
            raise ConfigError(f"--set {item}: {error}") from error
        origins[tuple(key.split("."))] = f"--set {item}"
    return Layer(values, origins)


def _check_strategy(run: RunFile, where: Callable[[KeyPath], str]) -> None:
    options = registry.as_mapping(run.strategy)
    name = options.pop("name")
    if name == registry.AUTO:
        return
    try:
        registry.strategy_class(name)
    except ConfigError as error:
        raise ConfigError(f"{where(())}: strategy: {error}") from error
    registry.make(name, options, where=where)


def _where(key: KeyPath, document: Document, layers: Sequence[Layer]) -> str:
    for layer in reversed(layers):
        if (origin := layer.where(key)) is not None:
            return origin
    return document.where(key)
