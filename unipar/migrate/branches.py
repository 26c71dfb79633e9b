"""Branches: which of two places of a program a run reaches."""

from __future__ import annotations

import libcst as cst

from unipar.migrate.source import Source

_LEAVING = (cst.Return, cst.Raise)


def exclusive(source: Source, one: cst.CSTNode, other: cst.CSTNode) -> bool:
    """Return whether a call of their function comes to at most one of two nodes.

    They stand in different branches of an ``if`` or a ``match``, or one in a branch that leaves
    the function.
    """
    if source.function(one) is not source.function(other):
        return False
    first, second = sorted((one, other), key=lambda node: source.span(node)[0])
    path, theirs = [first, *source.around(first)], {second, *source.around(second)}
    mine = set(path)
    for above in path:
        if isinstance(above, (cst.FunctionDef, cst.Lambda)):
            break
        if isinstance(above, (cst.If, cst.IfExp)) and above in theirs:
            body, rest = above.body, above.orelse
            return (body in mine and rest in theirs) or (rest in mine and body in theirs)
        if isinstance(above, cst.Match) and above in theirs:
            ours, its = ([case for case in above.cases if case in one] for one in (mine, theirs))
            return bool(ours and its) and ours != its
        if isinstance(above, cst.If) and any(_leaves(one) for one in _branches(above) & mine):
            return True
    return False


def _branches(node: cst.If) -> set[cst.CSTNode]:
    return {node.body, *([node.orelse.body] if isinstance(node.orelse, cst.Else) else [])}


def _leaves(block: cst.CSTNode) -> bool:
    assert isinstance(block, cst.BaseSuite)
    last = block.body[-1] if block.body else None
    if isinstance(last, cst.SimpleStatementLine):
        last = last.body[-1]
    return isinstance(last, _LEAVING)
