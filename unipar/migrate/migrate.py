"""From the text of scripts to the text of unipar scripts."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from unipar.errors import ConfigError
from unipar.migrate.migrated_files import (
    done,
    imported_files,
    module_of,
    packages_of,
    reached,
    uses_unipar,
)
from unipar.migrate.notebooks import SUFFIX, Notebook
from unipar.migrate.notes import Migration, Note

if TYPE_CHECKING:
    import libcst as cst

    from unipar.migrate.dialects import Dialect
    from unipar.migrate.plan import Plan


def migrate_source(
    source: str,
    *,
    dialect: str = "auto",
    file: str = "script.py",
    settings: Mapping[str, str] | None = None,
) -> Migration:
    """Rewrite one training script or notebook, without running it.

    Args:
        source: the script, or the JSON of the notebook.
        dialect: what it is written for; ``auto`` finds out.
        file: its name, for messages; one that ends in ``.ipynb`` is a notebook's.
        settings: see :func:`migrate_files`.

    Raises:
        ConfigError: it has a syntax error, or there is no such dialect.
    """
    return migrate_files({file: source}, dialect=dialect, settings=settings)[file]


def migrate_files(
    files: Mapping[str, str],
    *,
    dialect: str = "auto",
    settings: Mapping[str, str] | None = None,
    beside: Mapping[str, str] | None = None,
) -> dict[str, Migration]:
    """Rewrite a script of several files together, without running any.

    Where something in one file is refused, all are left alone.

    Args:
        files: their text, by paths relative to where they import each other from.
        dialect: what they are written for; ``auto`` finds out.
        settings: the text of JSON and YAML files beside them, by paths likewise, for the
            frameworks whose settings stand in such.
        beside: the text of further Python files that these import, which are only looked at.

    Raises:
        ConfigError: one has a syntax error, or there is no such dialect.
    """
    _check_dialect(dialect)
    notebooks = {name: Notebook(name, files[name]) for name in files if name.endswith(SUFFIX)}
    scripts = {**files, **{name: one.script for name, one in notebooks.items()}}
    migrations = _migrate_scripts(scripts, dialect, settings or {}, beside or {})
    for name, notebook in notebooks.items():
        migrations[name] = _in_cells(notebook, files[name], migrations[name])
    return migrations


def _in_cells(notebook: Notebook, text: str, one: Migration) -> Migration:
    """The migration of a notebook, from that of its script."""
    notes = []
    for note in one.notes:
        cell, line = notebook.place(note.line)
        notes.append(dataclasses.replace(note, cell=cell, line=line))
    code = notebook.with_script(one.code) if one.changed else text
    return dataclasses.replace(one, code=code, notes=tuple(notes))


def _migrate_scripts(
    files: Mapping[str, str], dialect: str, settings: Mapping[str, str], beside: Mapping[str, str]
) -> dict[str, Migration]:
    trees = {name: _parsed(name, text) for name, text in files.items()}
    alone = {name: Migration(text) for name, text in files.items()}
    migrated = done(trees)
    read = {name: text for name, text in files.items() if name not in migrated}
    if not any(_mentions(trees[name]) for name in read):
        return alone
    try:
        return {**alone, **_migrate(read, dialect, settings, beside)}
    except RecursionError:
        name = max(read, key=lambda one: len(read[one]))
        note = Note(name, 1, "refused", name, "it nests too deeply to be read.", "Split it up.")
        return {**alone, name: dataclasses.replace(alone[name], notes=(note,))}


def _check_dialect(name: str) -> None:
    from unipar.migrate.dialects import DIALECTS

    allowed = ["auto", *(one.name for one in DIALECTS)]
    if name not in allowed:
        raise ConfigError(f"there is no dialect '{name}'. Choose one of {', '.join(allowed)}.")


def _migrate(
    files: Mapping[str, str], wanted: str, settings: Mapping[str, str], beside: Mapping[str, str]
) -> dict[str, Migration]:
    import libcst as cst

    from unipar.migrate.lone_ranks import tell_of_lone_ranks
    from unipar.migrate.models import find_models
    from unipar.migrate.plan import Plan
    from unipar.migrate.source import Source

    sources: dict[str, Source] = {}
    for name, text in files.items():
        module = module_of(name)
        try:
            sources[module] = Source(name, text, module)
        except cst.ParserSyntaxError as error:
            note = Note(
                name, error.raw_line, "refused", name, "LibCST cannot read this Python.",
                "Write it for an older Python.",
            )  # fmt: skip
            return {name: Migration(text, notes=(note,))}
        if "\r" in text.replace("\r\n", ""):
            note = Note(
                name, 1, "refused", name, "a carriage return ends some of its lines.",
                "Save it with \\n or \\r\\n at the end of every line.",
            )  # fmt: skip
            return {name: Migration(text, notes=(note,))}
    plan = Plan(sources, settings)
    dialect = _dialect(plan, wanted)
    dialect.rewrite(plan)
    if any(source.edits for source in plan.sources):
        find_models(plan)
        tell_of_lone_ranks(plan, dialect)
        _tell_of_others(plan, dialect)
        _tell_of_files(plan, dialect, beside)
    notes = sorted(set(plan.notes))
    refused = any(note.kind == "refused" for note in notes)
    changed = any(source.edits for source in plan.sources) and not refused
    result: dict[str, Migration] = {}
    for source in plan.sources:
        code = source.edits.result().decode() if changed else source.text
        own = tuple(note for note in notes if note.file == source.name)
        result[source.name] = Migration(
            code,
            dict(plan.config) if changed else {},
            own,
            dialect.name if changed or own else "",
            code != source.text,
            plan.launcher,
            dict(plan.launched),
        )
        ast.parse(code)
    return result


def _dialect(plan: Plan, wanted: str) -> Dialect:
    """Find the dialect: by the calls that train; else by what is imported and called."""
    from unipar.migrate.dialects import DIALECTS
    from unipar.migrate.imports import imported

    if wanted != "auto":
        return next(one for one in DIALECTS if one.name == wanted)
    calls = {name for source in plan.sources for call in source.calls()
             for name in plan.flow.names(call.func)}  # fmt: skip
    training = [one for one in DIALECTS if any(map(one.is_trained_by, calls))]
    if training:
        return training[0]
    # loss.backward() is PyTorch's; of a framework's object, backward takes the loss.
    plain = any(not call.args for _, call, _ in plan.methods("backward"))
    used = calls.union(
        *(imported(node) for node in _imports_of(plan)
          if not (plain and plan.flow.source(node).is_tried(node)))
    )  # fmt: skip
    found = (one for one in DIALECTS if not plain or one.concerns("torch"))
    return next((one for one in found if any(map(one.marked, used))), DIALECTS[-1])


def _tell_of_others(plan: Plan, dialect: Dialect) -> None:
    """Note what belongs to another framework than the one that the program is migrated from."""
    from unipar.migrate.dialects import DIALECTS, FaceDialect
    from unipar.migrate.imports import imported

    for other in DIALECTS:
        if other is dialect:
            continue
        nodes: list[cst.CSTNode] = []
        if isinstance(other, FaceDialect):
            nodes += [node for node in _imports_of(plan) if any(map(other.marked, imported(node)))]
        elif not dialect.concerns("torch"):
            nodes += [
                call for source in plan.sources for call in source.calls()
                if any(map(other.is_trained_by, plan.flow.names(call.func)))
            ]  # fmt: skip
        for node in nodes:
            plan.tell(
                node, f"it is {other.title}'s and stays so: the program is migrated as one for "
                f"{dialect.title}.",
                f"If this is what trains it, give --from {other.name}.",
            )  # fmt: skip


def _tell_of_files(plan: Plan, dialect: Dialect, beside: Mapping[str, str]) -> None:
    """Note imports of files that import the framework, and are not migrated with the program."""
    trees: dict[str, ast.Module] = {}
    for name, text in beside.items():
        with contextlib.suppress(SyntaxError, ValueError):
            trees[name] = ast.parse(text)
    left = {
        name for name, tree in trees.items()
        if not uses_unipar(tree) and any(map(dialect.concerns, packages_of(tree)))
    }  # fmt: skip
    edges = {name: imported_files(tree, name, trees) for name, tree in trees.items()}
    for source in plan.sources:
        for one in ast.walk(ast.parse(source.text)):
            if isinstance(one, (ast.Import, ast.ImportFrom)):
                found = left & reached(edges, imported_files(one, source.name, trees))
                if found:
                    plan.notes.append(Note(
                        source.name, one.lineno, "changed", ast.unparse(one),
                        f"{', '.join(sorted(found))} imports the framework too, and is not "
                        "migrated with it.", "Name the folder, or these files as well.",
                    ))  # fmt: skip


def _imports_of(plan: Plan) -> list[cst.Import | cst.ImportFrom]:
    import libcst as cst

    kinds = (cst.Import, cst.ImportFrom)
    return [node for source in plan.sources for kind in kinds for node in source.all(kind)]


def _parsed(name: str, text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(
            f"{name}:{error.lineno or 1}: syntax error: {error.msg}. Mend it, and migrate again."
        ) from error
    except ValueError as error:  # A null byte.
        raise ConfigError(f"{name}:1: this is no Python: {error}.") from error


def _mentions(tree: ast.Module) -> bool:
    """Return whether a file imports anything that a dialect is about."""
    packages = {"torch", "horovod", "deepspeed", "accelerate", "colossalai", "lightning",
                "lightning_fabric"}  # fmt: skip
    return any(name.partition(".")[0] in packages for name in _imports(tree))


def _imports(tree: ast.Module) -> list[str]:
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(node.module)
    return found
