"""Reading the scripts that are named, and writing what becomes of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from unipar.errors import ConfigError
from unipar.migrate.notebooks import SUFFIX
from unipar.migrate.notes import Migration

CONFIG = "unipar.yaml"
_READ = (".py", SUFFIX)
_SETTINGS = (".json", ".yaml", ".yml")
_LARGEST_SETTINGS = 2**18
"""Bytes up to which a file is read as settings; larger ones are data."""


@dataclass(frozen=True)
class Program:
    """What is migrated together.

    Attributes:
        root: the directory that the paths start from.
        files: the text of each file, by its path from there.
        whole: whether a directory was named, so that all of it is written.
        settings: the text of JSON and YAML files, likewise: those in a directory that was named,
            and in the directories of scripts that were.
    """

    root: Path
    files: Mapping[str, str]
    whole: bool
    settings: Mapping[str, str]


def read(paths: Sequence[Path]) -> Program:
    """Read scripts and notebooks, and those in directories.

    Raises:
        ConfigError: there is no such file, or it is no text.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = [
                p for p in sorted(path.rglob("*"))
                if p.suffix in _READ and p.is_file() and not _hidden(p.relative_to(path))
            ]  # fmt: skip
            if not inside:
                raise ConfigError(f"{path} holds no Python files or notebooks.")
            found += inside
        elif path.suffix not in _READ:
            raise ConfigError(f"{path} is no Python file (.py) or notebook (.ipynb).")
        elif path.is_file():
            found.append(path)
        else:
            raise ConfigError(f"there is no file {path}.")
    whole = any(path.is_dir() for path in paths) or len(found) > 1
    top = paths[0] if len(paths) == 1 and paths[0].is_dir() else None
    root = top or Path(os.path.commonpath([p.resolve().parent for p in found]))
    root = root.resolve()
    files = {p.resolve().relative_to(root).as_posix(): _text(p) for p in found}
    return Program(root, files, whole, _settings(root, {p.resolve().parent for p in found}, top))


def _settings(root: Path, beside: set[Path], top: Path | None) -> dict[str, str]:
    if top is None:
        paths = [path for one in sorted(beside) for path in sorted(one.iterdir())]
    else:
        paths = [path for path in sorted(root.rglob("*")) if not _hidden(path.relative_to(root))]
    return {
        path.relative_to(root).as_posix(): path.read_bytes().decode(errors="replace")
        for path in paths
        if path.suffix in _SETTINGS and path.is_file()
        and path.stat().st_size <= _LARGEST_SETTINGS
    }  # fmt: skip


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _text(path: Path) -> str:
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not in UTF-8. Save it in UTF-8, and try again.") from error
    with path.open("rb") as file:
        try:
            encoding, _ = tokenize.detect_encoding(file.readline)
        except SyntaxError as error:
            raise ConfigError(f"{path}:1: {error}.") from error
    if text.startswith("\ufeff"):
        raise ConfigError(f"{path} begins with a byte order mark. Save it in UTF-8 without one.")
    if encoding not in ("utf-8", "utf-8-sig"):
        raise ConfigError(f"{path} says that it is in {encoding}. Save it in UTF-8.")
    return text


def config_text(migration: Migration) -> str:
    """``unipar.yaml`` for a migrated script."""
    import yaml

    head = "# How the script beside this runs: change `strategy`, and the same loop goes on.\n"
    return head + yaml.safe_dump(dict(migration.config), sort_keys=False)


def write(
    program: Program,
    migrations: Mapping[str, Migration],
    *,
    output: Path | None,
    in_place: bool,
    force: bool,
) -> list[Path]:
    """Write the migrated files and ``unipar.yaml``.

    Returns:
        What was written.

    Raises:
        ConfigError: something is in the way.
    """
    targets = _targets(program, migrations, output, in_place)
    main = next(one for one in migrations.values() if one.changed)
    place = program.root if in_place else next(iter(targets.values())).parent
    if program.whole and not in_place:
        place = output or _beside(program.root)
    config = place / CONFIG
    text = {path: migrations[name].code for name, path in targets.items()}
    text[config] = config_text(main)
    if in_place and not force:
        _check_clean(program)
    for path, content in text.items():
        if path.exists() and path.read_bytes().decode() != content and not (in_place or force):
            raise ConfigError(f"{path} is there already. Pass --force to write over it.")
    if config.exists() and in_place and not force and config.read_text() != text[config]:
        raise ConfigError(f"{config} is there already. Pass --force to write over it.")
    for path, content in text.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if in_place and path.exists():
            shutil.copy2(path, path.with_name(path.name + ".orig"))
        path.write_bytes(content.encode())
    return list(text)


def _targets(
    program: Program, migrations: Mapping[str, Migration], output: Path | None, in_place: bool
) -> dict[str, Path]:
    if in_place:
        return {name: program.root / name for name, one in migrations.items() if one.changed}
    if output is not None:
        return {name: output / name for name in migrations}
    if program.whole:
        return {name: _beside(program.root) / name for name in migrations}
    return {
        name: (program.root / name).with_name(f"{Path(name).stem}_unipar{Path(name).suffix}")
        for name in migrations
    }  # fmt: skip


def _beside(root: Path) -> Path:
    return root.with_name(f"{root.name}_unipar")


def _check_clean(program: Program) -> None:
    command = ["git", "-C", str(program.root), "status", "--porcelain", "--", *program.files]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"git cannot be asked ({error}). Pass --force to go on.") from error
    if done.returncode:
        raise ConfigError(
            f"{program.root} is in no git repository, so a change could not be taken back. "
            "Pass --force; the originals are kept as *.orig."
        )
    if done.stdout.strip():
        raise ConfigError(
            "these files have changes that are not committed:\n"
            f"{done.stdout.rstrip()}\nCommit them, or pass --force."
        )
