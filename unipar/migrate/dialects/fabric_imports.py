"""The names of Fabric that are left once its calls are rewritten: annotations, and imports."""

from __future__ import annotations

from collections.abc import Collection

import libcst as cst

from unipar.migrate.expressions import FABRIC
from unipar.migrate.imports import imported
from unipar.migrate.plan import Plan
from unipar.migrate.source import Source


def rewrite_annotation(plan: Plan, node: cst.CSTNode) -> bool:
    """Let an annotation that says ``Fabric`` say what takes its place; whether it did."""
    if plan.flow.names(node).isdisjoint(FABRIC):  # pyright: ignore[reportArgumentType]
        return False
    plan.replace(node, "fabricated.Run")
    return True


def drop_imports(plan: Plan, packages: Collection[str], kept: Collection[cst.CSTNode]) -> None:
    """Take out what is imported of these packages and stands in none of the kept expressions."""
    for source in plan.sources:
        used = {_root(node) for node in kept if plan.flow.source(node) is source}
        for node in (*source.all(cst.Import), *source.all(cst.ImportFrom)):
            relative = isinstance(node, cst.ImportFrom) and node.relative
            if not relative and not isinstance(node.names, cst.ImportStar):
                _drop(source, node, packages, used)


def _drop(
    source: Source, node: cst.Import | cst.ImportFrom, packages: Collection[str], used: set[str]
) -> None:
    assert not isinstance(node.names, cst.ImportStar)
    names = imported(node)
    rest = [
        alias for alias, name in zip(node.names, names, strict=True)
        if _bound(node, alias) in used
        or not any(f"{name}.".startswith(f"{one}.") for one in packages)
    ]  # fmt: skip
    if not rest:
        source.remove(node)
    elif len(rest) < len(node.names):
        listed = ", ".join(source.code(one).rstrip(" ,") for one in rest)
        head = "import"
        if isinstance(node, cst.ImportFrom) and node.module is not None:
            head = f"from {source.code(node.module)} import"
        source.edits.replace(source.span(node), f"{head} {listed}")


def _bound(node: cst.Import | cst.ImportFrom, alias: cst.ImportAlias) -> str:
    """The name that an import brings in."""
    if alias.evaluated_alias is not None:
        return alias.evaluated_alias
    name = alias.evaluated_name
    return name.partition(".")[0] if isinstance(node, cst.Import) else name


def _root(node: cst.CSTNode) -> str:
    while isinstance(node, cst.Attribute):
        node = node.value
    return node.value if isinstance(node, cst.Name) else ""
