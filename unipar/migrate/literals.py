"""Arguments of calls, and values of literals."""

from __future__ import annotations

from typing import Any

import libcst as cst


def argument(call: cst.Call, index: int | None, name: str) -> cst.BaseExpression | None:
    """An argument of a call, by position or by keyword."""
    for position, one in enumerate(call.args):
        if one.star:
            return None
        if one.keyword is not None and one.keyword.value == name:
            return one.value
        if one.keyword is None and position == index:
            return one.value
    return None


def constant(node: cst.CSTNode | None) -> Any:
    """The value of a literal; ``None`` where it is none."""
    if isinstance(node, (cst.Integer, cst.Float)):
        return node.evaluated_value
    if isinstance(node, (cst.SimpleString, cst.ConcatenatedString)):
        return node.evaluated_value
    if isinstance(node, cst.Name) and node.value in ("True", "False"):
        return node.value == "True"
    return None
