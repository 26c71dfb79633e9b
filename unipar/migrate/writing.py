"""Reading the scripts that are named, and writing what becomes of them."""

from __future__ import annotations

import ast
import filecmp
import os
import re
import shutil
import subprocess
import tokenize
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from unipar.errors import ConfigError
from unipar.migrate.folders import Others, others, walk
from unipar.migrate.migrated_files import files_beside, scripts
from unipar.migrate.notebooks import SUFFIX, Notebook
from unipar.migrate.notes import Migration

CONFIG = "unipar.yaml"
_READ = (".py", SUFFIX)
_SETTINGS = (".json", ".yaml", ".yml")
_LARGEST_SETTINGS = 2**18
"""Bytes up to which a file is read as settings; larger ones are data."""


@dataclass(frozen=True)
class Program:
    """The files that are migrated together.

    Attributes:
        root: the directory that the paths start from.
        files: the text of each file, by its path from there.
        whole: whether a directory was named, so that all of it is written.
        settings: the text of JSON and YAML files, likewise: those in a directory that was named,
            and in the directories of scripts that were.
        folder: whether a directory was named, and nothing else, so that all in it belongs to it.
        beside: the text of further Python files that those of the program import.
    """

    root: Path
    files: Mapping[str, str]
    whole: bool
    settings: Mapping[str, str]
    folder: bool = False
    beside: Mapping[str, str] = field(default_factory=dict)


def read(paths: Sequence[Path]) -> Program:
    """Read scripts and notebooks, and those in directories.

    Raises:
        ConfigError: there is no such file, or it is no text.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = [one for one in walk(path) if one.suffix in _READ]
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
    settings = _settings(root, {p.resolve().parent for p in found}, top)
    beside = files_beside(root, files) if top is None else {}
    return Program(root, files, whole, settings, top is not None, beside)


def _settings(root: Path, beside: set[Path], top: Path | None) -> dict[str, str]:
    if top is None:
        paths = [path for one in sorted(beside) for path in sorted(one.iterdir())]
    else:
        paths = [*walk(root)]
    return {
        path.relative_to(root).as_posix(): path.read_bytes().decode(errors="replace")
        for path in paths
        if path.suffix in _SETTINGS and path.is_file()
        and path.stat().st_size <= _LARGEST_SETTINGS
    }  # fmt: skip


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

    text = "# How the script beside this runs: change `strategy`, and the same loop goes on.\n"
    if "strategy" not in migration.config:
        text += (
            "# Left out, it is what the script asks for, or else ddp; on one process single.\n"
            "# strategy: ddp\n"
        )
    if migration.config:
        text += yaml.safe_dump(dict(migration.config), sort_keys=False)
    return text


@dataclass(frozen=True)
class Output:
    """The output of a migration.

    Attributes:
        files: their content.
        kept: the originals that are written over, by where they are kept.
        copied: other files of the program, by where they are copied to.
        others: what of the program's folder is copied, and what is left out.
    """

    files: Mapping[Path, str]
    kept: Mapping[Path, Path]
    copied: Mapping[Path, Path] = field(default_factory=dict)
    others: Others = field(default_factory=Others)


def plan_output(
    program: Program,
    migrations: Mapping[str, Migration],
    *,
    output: Path | None,
    in_place: bool,
    force: bool,
    script: str | None = None,
) -> Output:
    """The migrated program and ``unipar.yaml``, of which nothing is written yet.

    That stands beside each script that is started, for there it is read.

    Args:
        program: that is migrated.
        migrations: of its files.
        output: where they go, if it is given.
        in_place: write over the originals.
        force: write over what is there.
        script: the one that is run, if it is given.

    Raises:
        ConfigError: something is in the way.
    """
    targets = _targets(program, migrations, output, in_place)
    main = next(one for one in migrations.values() if one.changed)
    place = program.root if in_place else output or program.root
    if program.whole and not in_place:
        place = output or _beside(program.root)
    configs = {
        PurePosixPath(one).with_name(CONFIG).as_posix()
        for one in [*_started(program, migrations), *([script] if script else [])]
    } or {CONFIG}
    text = {path: migrations[name].code for name, path in targets.items()}
    text |= {place / one: config_text(main) for one in sorted(configs)}
    if not in_place:
        _check_originals(program, text)
    elif not force:
        _check_clean(program)
    found = Others()
    if program.folder and not in_place:
        found = others(program.root, {*program.files, *configs}, place)
    names = [name for every in found.copied.values() for name in every]
    copied = {place / name: program.root / name for name in names}
    over = {path: path.with_name(f"{path.name}.orig") for path in text if path.exists()}
    kept = {there: path for path, there in over.items()} if in_place else {}
    if not force:
        new = {path: code.encode() for path, code in text.items()}
        for path in targets.values() if in_place else ():
            del new[path]
        _check_free(new, {**kept, **copied})
    return Output(text, kept, copied, found)


def write(output: Output) -> list[Path]:
    """Write all files, and none where one of them fails or an interrupt comes.

    Returns:
        What was written.

    Raises:
        ConfigError: a file cannot be written.
    """
    copies = {**output.kept, **output.copied}
    new: dict[Path, bytes | Path] = {**copies}
    new |= {path: text.encode() for path, text in output.files.items()}
    staged = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in new}
    before: dict[Path, bytes | None] = {}
    try:
        for path, content in new.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                shutil.copyfile(content, staged[path])
            else:
                staged[path].write_bytes(content)
            like = copies.get(path, path)
            if like.exists():
                shutil.copymode(like, staged[path])
        for path in new:
            before[path] = path.read_bytes() if path.exists() else None
            staged[path].replace(path)
    except BaseException as error:
        for path, content in before.items():
            if content is None:
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(content)
        if isinstance(error, OSError):
            raise ConfigError(f"nothing was written: {error}.") from error
        raise
    finally:
        for path in staged.values():
            path.unlink(missing_ok=True)
    return [*output.files]


def _check_originals(program: Program, targets: Iterable[Path]) -> None:
    originals = {program.root / name for name in program.files}
    for path in targets:
        if path.resolve() in originals:
            raise ConfigError(
                f"{path} is what is migrated. Give another --output, or write over it with "
                "--in-place, which keeps it as *.orig."
            )


def _check_free(new: Mapping[Path, bytes], copies: Mapping[Path, Path]) -> None:
    other = [path for path, text in new.items() if path.exists() and path.read_bytes() != text]
    other += [
        path for path, original in copies.items()
        if path.exists() and not filecmp.cmp(path, original, shallow=False)
    ]  # fmt: skip
    if other:
        raise ConfigError(f"{other[0]} is there already. Pass --force to write over it.")


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


def runnable(program: Program) -> list[str]:
    """The files that no other imports, tests aside."""
    trees = {
        name: tree for name, tree in _trees(program).items()
        if not re.search(r"(^|/)(test_[^/]*|[^/]*_test|conftest)\.", name)
    }  # fmt: skip
    return scripts(trees, trees)


def _started(program: Program, migrations: Mapping[str, Migration]) -> list[str]:
    """The scripts that come to what is migrated."""
    return scripts(_trees(program), [name for name, one in migrations.items() if one.changed])


def _trees(program: Program) -> dict[str, ast.Module]:
    return {
        name: ast.parse(Notebook(name, text).script if name.endswith(SUFFIX) else text)
        for name, text in program.files.items()
    }


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
