"""What begins with an underscore is used by the package that defines it, and by no other."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = [
    path
    for folder in (ROOT / "unipar", *sorted(ROOT.glob("backends/*/unipar_*")))
    for path in sorted(folder.rglob("*.py"))
]
STAMP = re.compile(
    r"\b(torch|PyTorch|DeepSpeed|Horovod|Accelerate|Colossal-AI|Fabric|LibCST|CPython|submitit)"
    r" \d+\.\d+"
    # A patch that refuses to be put over another text than it was written for.
    r"|source=\"[0-9a-f]{64}\""
)
COMMON = {
    *("_foreach_mul_", "_foreach_copy_", "_version", "_base", "_C", "_dynamo", "_pytree"),
    *("_parameters", "_buffers", "_asdict", "_replace", "_exit"),
}
"""Of torch and Python, to be had in no other way, and older than any version that is supported."""


def package(path: Path) -> str:
    """Each package of the core's, the modules beside them, and each backend."""
    parts = path.relative_to(ROOT).parts
    if parts[0] == "backends":
        return parts[2]
    return f"unipar.{parts[1]}" if len(parts) > 2 else "unipar"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def defined(within: ast.AST) -> Iterator[str]:
    for node in ast.walk(within):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}:
                yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # `__slots__`, and what is set by name.
            yield node.value


def used(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Lines and names; and whether it must be ours: a class's own, or imported from a package."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
            yield node.lineno, node.attr, own
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, alias.name, (node.module or "").startswith("unipar")


DEFINED: dict[str, set[str]] = defaultdict(set)
CLASSES: dict[str, list[tuple[str, ast.ClassDef]]] = defaultdict(list)
for one in SOURCES:
    DEFINED[package(one)].update(filter(is_private, defined(tree(one))))
    for node in ast.walk(tree(one)):
        if isinstance(node, ast.ClassDef):
            CLASSES[node.name].append((package(one), node))
STAMPED = {path for path in SOURCES if STAMP.search(path.read_text(encoding="utf-8"))}


def overridden(name: str, by: ast.ClassDef) -> Iterator[str]:
    """Private members of base classes in other packages, that a class defines once more."""
    own = set(filter(is_private, defined(by)))
    bases = [base.id for base in by.bases if isinstance(base, ast.Name)]
    for owner, base in (known for base_name in bases for known in CLASSES.get(base_name, ())):
        if owner != name:
            yield from own & set(filter(is_private, defined(base)))
        yield from own & set(overridden(name, base))


def imported(path: Path) -> Iterator[tuple[int, str, str]]:
    """Lines, modules of unipar's, and what private names are imported of them."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [(node.module or "", alias.name) for alias in node.names]
        else:
            continue
        for module, name in found:
            private = [part for part in (*module.split("."), name) if is_private(part)]
            if module.startswith("unipar") and private:
                yield node.lineno, module, private[0]


def test_no_package_imports_a_private_name_of_another() -> None:
    """Also one that has a private name like it, which the test below lets pass."""
    found = [
        f"{path.relative_to(ROOT)}:{line} {module} {name}"
        for path in SOURCES
        for line, module, name in imported(path)
        if ".".join(module.split(".")[: package(path).count(".") + 1]) != package(path)
    ]
    assert not found, f"a package uses what is private to another one: {found}"


def test_what_stands_beside_the_core_is_looked_at() -> None:
    assert {"unipar.testing", "unipar.benchmark", "unipar.migrate"} <= DEFINED.keys()


@pytest.mark.parametrize("name", sorted(DEFINED))
def test_no_other_package_uses_a_private_name(name: str) -> None:
    elsewhere = set().union(*(names for other, names in DEFINED.items() if other != name))
    foreign = elsewhere - DEFINED[name] - COMMON
    found = [
        f"{path.relative_to(ROOT)}:{line} {attribute}"
        for path in SOURCES
        if package(path) == name
        for line, attribute, is_ours in used(path)
        # A framework may have a private name that is one of ours, too.
        if attribute in foreign and (is_ours or path not in STAMPED)
    ]
    found += [
        f"{cls.name}.{member}"
        for cls in (cls for known in CLASSES.values() for owner, cls in known if owner == name)
        for member in overridden(name, cls)
    ]
    assert not found, f"{name} uses what is private to another package of unipar's: {found}"


def test_what_is_private_to_a_framework_is_used_beside_its_version() -> None:
    ours = set().union(*DEFINED.values())
    found = [
        f"{path.relative_to(ROOT)}:{line} {attribute}"
        for path in SOURCES
        if path not in STAMPED
        for line, attribute, _ in used(path)
        if is_private(attribute) and attribute not in ours | COMMON
    ]
    assert not found, f"say with which version that was seen, and in which file of it: {found}"
