"""Taking a loop apart into what ``fit`` is given."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from unipar.migrate.expressions import TQDM
from unipar.migrate.fit.batches import Batches
from unipar.migrate.fit.evaluating import evaluated_on
from unipar.migrate.fit.simple import (
    Fold,
    NotSimple,
    held,
    names,
    only_reports,
    statements,
    targets,
)
from unipar.migrate.loaders import LOADER
from unipar.migrate.loop import SCHEDULERS
from unipar.migrate.models import optimizers_of
from unipar.migrate.plan import Plan
from unipar.migrate.source import Source
from unipar.migrate.tracing import trace
from unipar.migrate.tree import inside

_WRAPPING = {*TQDM, "enumerate"}


def find(plan: Plan, backwards: Sequence[cst.Call]) -> Fold:
    """The parts of a program's loop.

    Raises:
        NotSimple: something has no place in ``fit``.
    """
    if len(backwards) > 1:
        raise NotSimple(backwards[1], "there are several backward passes; fit has one loss.")
    source = plan.flow.source(backwards[0])
    loops = source.loops(backwards[0])
    if not loops or len(loops) > 2 or not all(isinstance(one, cst.For) for one in loops):
        raise NotSimple(backwards[0], "it stands in no loop over epochs and batches.")
    fold = _begin(plan, source, [one for one in loops if isinstance(one, cst.For)])
    batches = loops[0]
    assert isinstance(batches, cst.For)
    index = _index(plan, batches)
    Batches(plan, fold, index).read(batches)
    if fold.whole is not batches:
        _read_epoch(plan, fold, batches)
    _check_names(plan, fold, index)
    return fold


def _begin(plan: Plan, source: Source, loops: list[cst.For]) -> Fold:
    batches, whole = loops[0], loops[-1]
    loader = _unwrapped(plan, _over(plan, batches))
    if not any(one.name in LOADER for one in plan.flow.values(loader)):
        raise NotSimple(batches.iter, "it is not seen that this is a DataLoader.")
    if not isinstance(loader, (cst.Name, cst.Attribute)):
        raise NotSimple(batches.iter, "the DataLoader is built in the loop.")
    if len(plan.optimizers) != 1:
        raise NotSimple(whole, f"{len(plan.optimizers)} optimizers are seen; fit has one.")
    ((origin, model),) = plan.optimizers.items()
    call = origin.node
    assert isinstance(call, cst.Call)
    statement = source.parent(call) if plan.flow.source(call) is source else None
    if (
        not isinstance(statement, cst.Assign)
        or not targets(statement)
        or source.function(call) is not source.function(whole)
    ):
        raise NotSimple(call, "the optimizer is not given a name in the function of the loop.")
    first = call.args[0].value
    if not isinstance(model, cst.Name) or source.code(first) != f"{model.value}.parameters()":
        raise NotSimple(call, "it is not built over model.parameters(), of a model with a name.")
    fold = Fold(source, whole, loader, _batch(plan, batches), model, (call, statement))
    if whole is not batches:
        fold.epochs = _epochs(plan, whole)
    for one in source.all(cst.Assign):
        if isinstance(one.value, cst.Call) and any(
            name.startswith(SCHEDULERS) for name in plan.flow.names(one.value.func)
        ):
            fold.scheduler = (one.value, one)
    return fold


def _over(plan: Plan, loop: cst.For) -> cst.BaseExpression:
    """Find what a loop goes over, also where a progress bar of it has a name."""
    found = trace(plan, loop.iter)
    bar = found[0] if len(found) == 1 else None
    return bar if isinstance(bar, cst.Call) and plan.flow.names(bar.func) & TQDM else loop.iter


def _unwrapped(plan: Plan, node: cst.BaseExpression) -> cst.BaseExpression:
    while isinstance(node, cst.Call) and plan.flow.names(node.func) & _WRAPPING and node.args:
        node = node.args[0].value
    return node


def _epochs(plan: Plan, loop: cst.For) -> cst.BaseExpression:
    count = _unwrapped(plan, loop.iter)
    if isinstance(count, cst.Call) and "range" in plan.flow.names(count.func):
        if len(count.args) == 1 and isinstance(loop.target, cst.Name):
            return count.args[0].value
        raise NotSimple(count, "epochs that do not begin at 0 are a script's own resuming.")
    raise NotSimple(loop.iter, "the number of epochs is not that of a range.")


def _index(plan: Plan, loop: cst.For) -> str:
    """The name of the number of a batch; nothing where there is none."""
    if isinstance(loop.target, cst.Tuple) and _is_enumerated(_over(plan, loop)):
        first = loop.target.elements[0].value
        if isinstance(first, cst.Name):
            return first.value
    return ""


def _is_enumerated(node: cst.BaseExpression) -> bool:
    return any(isinstance(one, cst.Name) and one.value == "enumerate" for one in inside(node))


def _batch(plan: Plan, loop: cst.For) -> cst.BaseExpression:
    if _index(plan, loop):
        assert isinstance(loop.target, cst.Tuple)
        if len(loop.target.elements) != 2:
            raise NotSimple(loop.target, "a batch and its number are expected here.")
        return loop.target.elements[1].value
    return loop.target


def _read_epoch(plan: Plan, fold: Fold, batches: cst.For) -> None:
    """The rest of an epoch: evaluation, checkpoints, and what only reports."""
    for one in statements(fold.whole.body):
        if one is batches:
            continue
        call = one.value if isinstance(one, cst.Expr) else None
        if isinstance(call, cst.Call) and isinstance(call.func, cst.Attribute):
            base, name = call.func.value, call.func.attr.value
            values = plan.flow.values(base)
            if name in ("train", "eval") and values & plan.models:
                continue
            if name == "zero_grad" and (optimizers_of(values) or values & plan.models):
                continue
            if fold.scheduler is not None and names(base) == targets(fold.scheduler[1]):
                raise NotSimple(
                    one, "this scheduler is stepped once an epoch; fit steps one at every step."
                )
            if "torch.save" in plan.flow.names(call.func):
                fold.saves.append(call)
                continue
        loader = evaluated_on(plan, fold, one)
        if loader is not None:
            if fold.evaluated is not None:
                raise NotSimple(one, "a second evaluation; fit has one set of evaluation data.")
            fold.evaluated = loader
        elif not only_reports(plan, one, held(fold)):
            raise NotSimple(one, "this has no place in fit.")
        fold.dropped.append(one)


def _filled(fold: Fold) -> set[str]:
    """The names of lists and tables that the loop adds to."""
    found: set[str] = set()
    for one in inside(fold.whole):
        base: cst.CSTNode | None = None
        if isinstance(one, (cst.AssignTarget, cst.AugAssign)):
            base = one.target.value if isinstance(one.target, cst.Subscript) else None
        elif isinstance(one, cst.Attribute) and one.attr.value == "append":
            base = one.value
        while isinstance(base, (cst.Attribute, cst.Subscript)):
            base = base.value
        if isinstance(base, cst.Name):
            found.add(base.value)
    return found


def _check_names(plan: Plan, fold: Fold, index: str) -> None:
    """Refuse names that the loop binds and others read, and the reverse."""
    source = fold.source
    assert fold.loss is not None
    kept = {name for one in fold.statements for name in targets(one)} | names(fold.batch)
    bound = {
        name for one in inside(fold.whole) for name in targets(one)
    } | {index, *names(fold.whole.target)}  # fmt: skip
    for part in (*(one.value for one in fold.statements), fold.loss):
        for one in inside(part):
            if isinstance(one, cst.Name) and one.value in bound - kept:
                raise NotSimple(one, f"the loss depends on `{one.value}` of the loop.")
    filled = bound | _filled(fold)
    begin, end = source.span(fold.whole)
    own = {fold.optimizer[1], *([fold.scheduler[1]] if fold.scheduler else [])}
    for one in source.all(cst.Name):
        scope, at = source.scope(one), source.span(one)[0]
        if scope is None or begin <= at < end or own & set(source.around(one)):
            continue
        if one.value in held(fold) and source.function(one) is source.function(fold.whole):
            raise NotSimple(
                one, "fit builds the optimizer and the scheduler: nothing else has them."
            )
        later = at >= end or source.function(one) is not source.function(fold.whole)
        binds = isinstance(source.parent(one), (cst.AssignTarget, cst.Param))
        here = source.scope(fold.whole)
        if later and not binds and one.value in filled and here is not None and any(
            binding.scope is here for binding in scope[one.value]
        ):  # fmt: skip
            raise NotSimple(one, f"it reads `{one.value}`, which the loop fills.")
