"""The files of a program that are migrated already."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath

_FACES = {
    "accelerate": ("accelerate",), "colossalai": ("colossalai",), "deepspeed": ("deepspeed",),
    "fabric": ("lightning_fabric", "lightning.fabric", "lightning.Fabric"),
    "horovod": ("horovod", "torch"), "torch": ("torch",),
}  # fmt: skip
"""What each face is imported in place of, wherever a program imports it."""


def done(trees: Mapping[str, ast.Module]) -> set[str]:
    """The files that use unipar, and those that they import, but for what was never migrated.

    Args:
        trees: the program, by paths relative to where its files import each other from.
    """
    faces = {
        one.split(".")[2] for tree in trees.values() for one in _imports(tree, "")
        if one.startswith("unipar.compat.")
    }  # fmt: skip
    replaced = {package for face in faces for package in _FACES.get(face, ())}
    edges = {name: imported_files(tree, name, trees) for name, tree in trees.items()}
    using = {name for name, tree in trees.items() if uses_unipar(tree)}
    return {
        name for name in reached(edges, using)
        if name in using or not _has_any(trees[name], replaced)
    }  # fmt: skip


def files_beside(root: Path, files: Mapping[str, str]) -> dict[str, str]:
    """The text of further files that some import, from the root or from beside them, and so on."""
    found: dict[str, str] = {}
    waiting = dict(files)
    while waiting:
        name, text = waiting.popitem()
        try:
            modules = _modules(ast.parse(text), name)
        except (SyntaxError, ValueError):
            continue  # Of those that are migrated it is told elsewhere; a notebook has its own.
        for module in modules:
            path = module.replace(".", "/")
            for one in (f"{path}.py", f"{path}/__init__.py"):
                if one not in files and one not in found and (root / one).is_file():
                    found[one] = waiting[one] = (root / one).read_text("utf-8", errors="replace")
    return found


def imported_files(tree: ast.AST, name: str, among: Collection[str]) -> set[str]:
    """The files of a program that one of them, or a statement of it, may import."""
    wanted = _modules(tree, name)
    return {one for one in among if one != name and module_of(one) in wanted}


def packages_of(tree: ast.AST) -> list[str]:
    """The names that a file imports, relative ones left out."""
    return [one for one in _imports(tree, "") if one]


def scripts(trees: Mapping[str, ast.Module], changed: Collection[str]) -> list[str]:
    """The files that are started, as far as imports tell, and come to one that was changed."""
    edges = {name: imported_files(tree, name, trees) for name, tree in trees.items()}
    imported = set().union(*edges.values())
    return [
        name for name in trees
        if name not in imported and PurePosixPath(name).name != "__init__.py"
        and not reached(edges, [name]).isdisjoint(changed)
    ]  # fmt: skip


def reached(edges: Mapping[str, set[str]], names: Iterable[str]) -> set[str]:
    """Files, and all that come by their imports."""
    found: set[str] = set()
    waiting = [*names]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += edges[one]
    return found


def module_of(name: str) -> str:
    """The name that a file is imported under."""
    return ".".join(PurePosixPath(name).with_suffix("").parts).removesuffix(".__init__")


def absolute(name: str, module: str) -> str:
    """The full name of what a module imports by a relative one."""
    if not name.startswith("."):
        return name
    level = len(name) - len(name.lstrip("."))
    package = module.split(".")[:-level] if level <= module.count(".") + 1 else []
    return ".".join([*package, name.lstrip(".")])


def _has_any(tree: ast.Module, packages: Collection[str]) -> bool:
    return any(
        one == package or one.startswith(f"{package}.")
        for one in packages_of(tree) for package in packages
    )  # fmt: skip


def uses_unipar(tree: ast.Module) -> bool:
    """Return whether a file imports unipar."""
    return any(name.partition(".")[0] == "unipar" for name in _imports(tree, ""))


def _modules(tree: ast.AST, name: str) -> set[str]:
    """The modules that a file may import, by their names from the root, and what holds them."""
    inside = ".".join(PurePosixPath(name).with_suffix("").parts)
    beside = inside.rpartition(".")[0]
    found: set[str] = set()
    for module in _imports(tree, inside):
        for full in (module, f"{beside}.{module}" if beside else module):
            parts = full.split(".")
            found |= {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    return found


def _imports(tree: ast.AST, module: str) -> list[str]:
    """The modules that may be imported: of ``from a import b`` both ``a`` and ``a.b``."""
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = absolute("." * node.level + (node.module or ""), module)
            found += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return found
