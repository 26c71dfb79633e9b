"""The files of a program that are migrated already."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import PurePosixPath


def done(trees: Mapping[str, ast.Module]) -> set[str]:
    """The files that use unipar, and those that they import.

    Args:
        trees: the program, by paths relative to where its files import each other from.
    """
    modules = {module_of(name): name for name in trees}
    found: set[str] = set()
    waiting = [name for name, tree in trees.items() if _uses_unipar(tree)]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [modules[one] for one in _imports(trees[name], module_of(name))
                        if one in modules]  # fmt: skip
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


def _uses_unipar(tree: ast.Module) -> bool:
    return any(name.partition(".")[0] == "unipar" for name in _imports(tree, ""))


def _imports(tree: ast.Module, module: str) -> list[str]:
    """The modules that may be imported: of ``from a import b`` both ``a`` and ``a.b``."""
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = absolute("." * node.level + (node.module or ""), module)
            found += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return found
