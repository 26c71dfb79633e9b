"""What a script tells ranks apart by."""

from __future__ import annotations

import libcst as cst

from unipar.migrate.plan import Plan
from unipar.migrate.source import Source
from unipar.migrate.tree import inside


def on_some_ranks(plan: Plan, source: Source, node: cst.CSTNode) -> bool:
    """Return whether a test of the rank decides if a place of a function is come to."""
    for above in source.around(node):
        if isinstance(above, cst.FunctionDef):
            return False
        if isinstance(above, cst.If) and any(tells_rank(plan, one) for one in inside(above.test)):
            return True
    return False


def tells_rank(plan: Plan, node: cst.CSTNode) -> bool:
    """Return whether a name says which rank this is."""
    if isinstance(node, cst.Name) and node.value != "__name__":
        words = node.value.lower().strip("_").split("_")
        if {"rank", "main", "master"} & set(words) or node.value == "is_global_zero":
            return True
    return plan.made_by(plan.flow.values(node), "torch.distributed.get_rank")
