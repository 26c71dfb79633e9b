"""Going over LibCST's nodes without its visitors, which cost most of a migration's time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import libcst as cst

# How the code is written, not what it says.
_FORM = {
    "asynchronous", "colon", "comma", "comment", "dot", "empty_lines", "equal", "first_colon",
    "footer", "header", "indent", "lbrace", "lbracket", "leading_lines", "lines_after_decorators",
    "lpar", "newline", "posonly_ind", "rbrace", "rbracket", "relative", "rpar", "second_colon",
    "semicolon", "separator", "trailing_comma",
}  # fmt: skip
# Where a class lists its fields in another order than code has them.
_ORDER: dict[type[cst.CSTNode], tuple[str, ...]] = {
    cst.Arg: ("keyword", "value"),
    cst.ClassDef: ("decorators", "name", "type_parameters", "bases", "keywords", "body"),
    cst.FunctionDef: ("decorators", "name", "type_parameters", "params", "returns", "body"),
    cst.MatchCase: ("pattern", "guard", "body"),
    cst.TypeAlias: ("name", "type_parameters", "value"),
    cst.IfExp: ("body", "test", "orelse"),
    cst.Parameters: ("posonly_params", "params", "star_arg", "kwonly_params", "star_kwarg"),
    cst.ExceptHandler: ("type", "name", "body"),
    cst.ExceptStarHandler: ("type", "name", "body"),
}


def children(node: cst.CSTNode) -> list[cst.CSTNode]:
    """List a node's children in the order of the code, without white space and punctuation."""
    found: list[cst.CSTNode] = []
    for name in _fields(type(node)):
        value = getattr(node, name)
        if isinstance(value, cst.CSTNode):
            found.append(value)
        elif type(value) in (list, tuple):
            found += value
    return found


def inside(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """A node and all in it, in the order of the code."""
    stack = [node]
    while stack:
        one = stack.pop()
        yield one
        stack += reversed(children(one))


@functools.cache
def _fields(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    if kind in _ORDER:
        return _ORDER[kind]
    return tuple(
        one.name
        for one in dataclasses.fields(kind)  # pyright: ignore[reportArgumentType]
        if one.name not in _FORM
        and not one.name.startswith(("whitespace", "trailing_w", "leading_w"))
    )
