"""The names that import statements bind."""

from __future__ import annotations

import libcst as cst


def imported(node: cst.Import | cst.ImportFrom) -> list[str]:
    """The names that an import brings in, from the package down."""
    if isinstance(node, cst.Import):
        return [_dotted(alias.name) for alias in node.names]
    if node.module is None or node.relative:
        return []
    module = _dotted(node.module)
    if isinstance(node.names, cst.ImportStar):
        return [module]
    return [f"{module}.{_dotted(alias.name)}" for alias in node.names]


def _dotted(node: cst.BaseExpression) -> str:
    if isinstance(node, cst.Attribute):
        return f"{_dotted(node.value)}.{node.attr.value}"
    return node.value if isinstance(node, cst.Name) else ""
