"""Evaluation after an epoch, of which ``fit`` is given the data."""

from __future__ import annotations

import libcst as cst

from unipar.migrate.fit.simple import Fold, NotSimple, names, statements, targets
from unipar.migrate.literals import argument
from unipar.migrate.loaders import LOADER
from unipar.migrate.plan import Plan
from unipar.migrate.tree import inside

_OFF = ("torch.no_grad", "torch.inference_mode")


def evaluated_on(plan: Plan, fold: Fold, node: cst.CSTNode) -> cst.BaseExpression | None:
    """The data that a statement evaluates the loss on; ``None`` where it evaluates nothing.

    Raises:
        NotSimple: it computes more than the loss.
    """
    if isinstance(node, cst.With) and _is_off(plan, *(one.item for one in node.items)):
        loops = [one for one in statements(node.body) if isinstance(one, cst.For)]
        return _loader(plan, fold, loops[0]) if len(loops) == 1 else None
    for call in inside(node) if isinstance(node, (cst.Assign, cst.Expr)) else ():
        functions = plan.flow.functions(call.func) if isinstance(call, cst.Call) else []
        if len(functions) == 1 and isinstance(call, cst.Call):
            found = _in_function(plan, fold, functions[0], call)
            if found is not None:
                return found
    return None


def _is_off(plan: Plan, *nodes: cst.BaseExpression) -> bool:
    """Return whether gradients are off under one of these."""
    for one in nodes:
        called = one.func if isinstance(one, cst.Call) else one
        if plan.flow.names(called) & set(_OFF):
            return True
    return False


def _in_function(
    plan: Plan, fold: Fold, function: cst.FunctionDef, call: cst.Call
) -> cst.BaseExpression | None:
    off = _is_off(plan, *(one.decorator for one in function.decorators))
    body = statements(function.body)
    for one in body:
        if isinstance(one, cst.With) and _is_off(plan, *(item.item for item in one.items)):
            off, body = True, [*body, *statements(one.body)]
    loops = [one for one in body if isinstance(one, cst.For)]
    if not off or len(loops) != 1:
        return None
    loader = _loader(plan, fold, loops[0])
    given = [one.name.value for one in function.params.params]
    if isinstance(loader, cst.Name) and loader.value in given:
        return argument(call, given.index(loader.value), loader.value)
    return loader


def _loader(plan: Plan, fold: Fold, loop: cst.For) -> cst.BaseExpression | None:
    """Find what a loop goes over that adds up nothing but the loss."""
    if not any(one.name in LOADER for one in plan.flow.values(loop.iter)):
        return None
    source = plan.flow.source(loop)
    criterion = _called(fold)
    for one in statements(loop.body):
        if isinstance(one, cst.Assign) and targets(one):
            continue
        if isinstance(one, cst.AugAssign) and isinstance(one.operator, cst.AddAssign):
            summed = names(one.value)
            made = [
                each.value for each in statements(loop.body)
                if isinstance(each, cst.Assign) and targets(each) & summed
            ]  # fmt: skip
            text = " ".join(source.code(each) for each in (one.value, *made))
            counts = isinstance(one.value, cst.Call) and "len(" in source.code(one.value)
            if counts or (criterion and f"{criterion}(" in text and "argmax" not in text):
                continue
        raise NotSimple(
            one, "evaluation computes more than the loss, and fit would have to be given it as "
            "metrics.",
        )  # fmt: skip
    return loop.iter


def _called(fold: Fold) -> str:
    """The name of the function that makes the loss."""
    assert fold.loss is not None
    made = [one.value for one in fold.statements if targets(one) & names(fold.loss)]
    for node in (*reversed(made), fold.loss):
        if isinstance(node, cst.Call):
            return fold.source.code(node.func)
    return ""
