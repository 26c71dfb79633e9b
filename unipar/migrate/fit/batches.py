"""The body of the loop over batches."""

from __future__ import annotations

import libcst as cst

from unipar.migrate.clipping import CLIP
from unipar.migrate.fit.simple import (
    Fold,
    NotSimple,
    held,
    names,
    only_reports,
    statements,
    targets,
)
from unipar.migrate.literals import argument, constant
from unipar.migrate.models import optimizers_of
from unipar.migrate.plan import Plan
from unipar.migrate.tree import inside


class Batches:
    """Reads the body of the loop over batches.

    Args:
        plan: the program.
        fold: what is found goes here.
        index: the name of the number of a batch.
    """

    def __init__(self, plan: Plan, fold: Fold, index: str) -> None:
        self._plan, self._fold, self._index = plan, fold, index
        self._source = fold.source
        self._before: list[cst.Assign | cst.AugAssign] = []
        self._events: list[str] = []
        self._outside: list[cst.Call] = []  # What is done at every batch.
        self._accumulating = False

    @property
    def _stepped(self) -> bool:
        return "step" in self._events

    def read(self, loop: cst.For) -> None:
        for one in statements(loop.body):
            if isinstance(one, cst.If) and self._steps_in(one):
                self._read_accumulation(one)
            else:
                self._read_statement(one)
        if loop.orelse is not None or not self._stepped:
            raise NotSimple(loop, "no step of the optimizer is seen in this loop.")
        self._check_clearing(loop)
        self._keep_what_leads_to_the_loss()

    def _check_clearing(self, loop: cst.For) -> None:
        """Refuse gradients that are not cleared between steps, or before one."""
        if self._fold.accumulated is not None and self._outside:
            raise NotSimple(
                self._outside[0], "it is done at every batch, though steps are taken at some."
            )
        allowed = [["backward", "step", "zero_grad"]]
        if self._fold.accumulated is None:
            allowed += [["zero_grad", *allowed[0]], ["zero_grad", "backward", "step"]]
        if self._events not in allowed:
            raise NotSimple(
                loop, "gradients are expected to be cleared once for each step, before its first "
                "backward pass or after the step.",
            )  # fmt: skip

    def _done(self, call: cst.Call) -> None:
        if not self._accumulating:
            self._outside.append(call)

    def _steps_in(self, node: cst.If) -> bool:
        optimizer = targets(self._fold.optimizer[1])
        return any(
            isinstance(one, cst.Call) and isinstance(one.func, cst.Attribute)
            and one.func.attr.value == "step" and names(one.func.value) <= optimizer
            for one in inside(node)
        )  # fmt: skip

    def _read_statement(self, node: cst.CSTNode) -> None:
        fold, plan = self._fold, self._plan
        if isinstance(node, cst.Expr) and isinstance(node.value, cst.Call):
            if self._read_call(node.value):
                return
        elif isinstance(node, (cst.Assign, cst.AugAssign)) and fold.loss is None and targets(node):
            self._before.append(node)
            return
        if not only_reports(plan, node, held(fold)):
            raise NotSimple(node, "this has no place in fit.")
        fold.dropped.append(node)

    def _read_call(self, call: cst.Call) -> bool:
        """Return whether a statement's call is part of a training step."""
        fold, flow = self._fold, self._plan.flow
        if flow.names(call.func) & set(CLIP):
            if self._source.code(call.args[0].value) != f"{fold.model.value}.parameters()":
                raise NotSimple(call, "fit clips all gradients of the model together.")
            kind = argument(call, 2, "norm_type")
            if kind is not None and constant(kind) != 2:
                raise NotSimple(call, "fit clips by the 2-norm.")
            if fold.loss is None or self._stepped:
                raise NotSimple(call, "it is expected between the backward pass and the step.")
            fold.clip = argument(call, 1, "max_norm")
            self._done(call)
            return True
        if not isinstance(call.func, cst.Attribute):
            return False
        name, base = call.func.attr.value, call.func.value
        values = flow.values(base)
        if name == "backward" and not flow.functions(call.func):
            if call.args:
                raise NotSimple(call, "fit's backward pass takes a loss and nothing else.")
            fold.loss = base
            self._events.append(name)
        elif name == "step" and optimizers_of(values):
            if fold.loss is None or call.args:
                raise NotSimple(call, "a step is expected after the backward pass, without more.")
            self._events.append(name)
            self._done(call)
        elif name == "step" and fold.scheduler is not None and self._is_scheduler(base):
            if not self._stepped or call.args:
                raise NotSimple(call, "fit steps a scheduler after the optimizer, without more.")
            self._done(call)
        elif name == "zero_grad" and (optimizers_of(values) or values & self._plan.models):
            self._events.append(name)
            self._done(call)
        elif not (name in ("train", "eval") and values & self._plan.models):
            return False
        return True

    def _is_scheduler(self, node: cst.BaseExpression) -> bool:
        assert self._fold.scheduler is not None
        return names(node) == targets(self._fold.scheduler[1])

    def _read_accumulation(self, node: cst.If) -> None:
        fold = self._fold
        test = node.test
        if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.Or):
            if "len(" not in self._source.code(test.right):
                raise NotSimple(test, "it cannot be seen when a step is taken.")
            fold.flushes, test = True, test.left
        left = test.left if isinstance(test, cst.Comparison) else None
        if (
            not isinstance(test, cst.Comparison) or not isinstance(left, cst.BinaryOperation)
            or not isinstance(left.operator, cst.Modulo)
            or self._source.code(left.left).replace(" ", "") not in (
                f"({self._index}+1)", f"{self._index}+1")
            or not isinstance(test.comparisons[0].operator, cst.Equal)
            or constant(test.comparisons[0].comparator) != 0
            or node.orelse is not None
        ):  # fmt: skip
            raise NotSimple(
                node.test, "a step is expected under `if (i + 1) % n == 0:`, with the batches' i."
            )
        fold.accumulated = left.right
        self._accumulating = True
        for one in statements(node.body):
            self._read_statement(one)
        self._accumulating = False

    # -- what the loss is made of ----------------------------------------------------------------

    def _keep_what_leads_to_the_loss(self) -> None:
        fold = self._fold
        assert fold.loss is not None
        wanted = fold.accumulated
        divided = False
        loss = fold.loss
        if wanted is not None and self._divides(loss):
            assert isinstance(loss, cst.BinaryOperation)
            loss, divided = loss.left, True
        needed = names(loss)
        for one in reversed(self._before):
            if not targets(one) & needed:
                if not only_reports(self._plan, one, held(fold)):
                    raise NotSimple(one, "this has no place in fit.")
                fold.dropped.append(one)
            elif isinstance(one, cst.AugAssign):
                by = isinstance(one.operator, cst.DivideAssign) and wanted is not None
                if not by or divided or not self._same(one.value):
                    raise NotSimple(one, "what leads to the loss is expected in assignments.")
                divided = True
            elif self._divides(one.value) and not divided:
                assert isinstance(one.value, cst.BinaryOperation)
                divided = True
                if self._source.code(one.value.left) not in targets(one):
                    loss_only = targets(one) == names(loss)
                    if not loss_only:
                        raise NotSimple(one, "only the loss itself is expected to be divided.")
                    loss = one.value.left
                    needed = (needed - targets(one)) | names(loss)
            elif not is_move(self._plan, one):
                fold.statements.insert(0, one)
                needed = (needed - targets(one)) | names(one.value)
        if wanted is not None and not divided:
            raise NotSimple(
                fold.loss, "the loss is not divided by the number of batches of a step, so a step "
                "is on the sum of their means; fit's is on the mean.",
            )  # fmt: skip
        fold.loss = loss

    def _divides(self, node: cst.BaseExpression) -> bool:
        return (
            isinstance(node, cst.BinaryOperation)
            and isinstance(node.operator, cst.Divide)
            and self._same(node.right)
        )

    def _same(self, node: cst.BaseExpression) -> bool:
        wanted = self._fold.accumulated
        return wanted is not None and self._source.code(node) == self._source.code(wanted)


def is_move(plan: Plan, node: cst.Assign) -> bool:
    """Return whether an assignment only puts a batch on a device, which fit does."""
    value = node.value
    bound = targets(node)
    if isinstance(value, cst.DictComp):
        moved = value.value
        return _is_moved(moved) and names(value.for_in.iter) <= bound | {"items"}
    values = [one.value for one in value.elements] if isinstance(value, cst.Tuple) else [value]
    return all(_is_moved(one) and _root(one) in bound for one in values)


def _is_moved(node: cst.BaseExpression) -> bool:
    return (
        isinstance(node, cst.Call)
        and isinstance(node.func, cst.Attribute)
        and node.func.attr.value in ("to", "cuda", "cpu")
        and isinstance(node.func.value, cst.Name)
        and not any(one.keyword and one.keyword.value == "dtype" for one in node.args)
    )


def _root(node: cst.BaseExpression) -> str:
    assert isinstance(node, cst.Call)
    assert isinstance(node.func, cst.Attribute)
    return node.func.value.value if isinstance(node.func.value, cst.Name) else ""
