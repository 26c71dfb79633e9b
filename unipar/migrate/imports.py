"""The names that import statements bind."""

from __future__ import annotations

import libcst as cst

from unipar.migrate.scopes import dotted


def imported(node: cst.Import | cst.ImportFrom) -> list[str]:
    """The names that an import brings in, from the package down."""
    if isinstance(node, cst.Import):
        return [dotted(alias.name) for alias in node.names]
    if node.module is None or node.relative:
        return []
    module = dotted(node.module)
    if isinstance(node.names, cst.ImportStar):
        return [module]
    return [f"{module}.{dotted(alias.name)}" for alias in node.names]
