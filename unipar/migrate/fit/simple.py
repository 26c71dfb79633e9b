"""The parts of a folded loop, and those that may be left out of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import libcst as cst

from unipar.migrate.expressions import TQDM
from unipar.migrate.plan import Plan
from unipar.migrate.source import Source
from unipar.migrate.tracing import trace
from unipar.migrate.tree import inside

# What only reports: functions by their names, and methods whatever they are called on.
_FUNCTIONS = {
    "abs", "bool", "dict", "enumerate", "float", "format", "int", "len", "list", "max", "min",
    "print", "range", "round", "str", "sum", "tuple", "zip", "math.exp", "math.sqrt", "math.log",
    "numpy.mean", "time.time", "time.perf_counter", "torch.exp", "torch.argmax", "tqdm.tqdm.write",
}  # fmt: skip
_OF_BARS = {"close", "refresh", "reset", "update"}
_METHODS = {
    "append", "argmax", "count", "cpu", "cuda", "detach", "eq", "exp", "flush", "float", "format",
    "get_last_lr", "info", "item", "items", "log", "long", "max", "mean", "min", "numel", "numpy",
    "set_description", "set_postfix", "size", "sum", "to", "tolist", "view_as", "write",
}  # fmt: skip


class NotSimple(Exception):
    """Something keeps a loop from being folded.

    Args:
        node: what.
        why: why.
    """

    def __init__(self, node: cst.CSTNode, why: str) -> None:
        super().__init__(why)
        self.node, self.why = node, why


@dataclass
class Fold:
    """The parts of a loop.

    Attributes:
        source: its file.
        whole: the outermost loop, which is replaced.
        loader: what it goes over.
        batch: the name or names of a batch.
        model: the model's name.
        optimizer: the call that builds the optimizer, and the statement.
        epochs: how often it goes over the data; ``None``: once.
        scheduler: likewise, of a scheduler that is stepped with the optimizer.
        statements: what leads to the loss.
        loss: the loss.
        accumulated: batches of a step.
        flushes: whether a step is taken on the rest at an epoch's end, too.
        clip: the norm that gradients are clipped to.
        evaluated: what is evaluated on after each epoch.
        saves: checkpoints in the loop, which fit makes instead.
        dropped: what only reports.
    """

    source: Source
    whole: cst.For
    loader: cst.BaseExpression
    batch: cst.BaseExpression
    model: cst.Name
    optimizer: tuple[cst.Call, cst.Assign]
    epochs: cst.BaseExpression | None = None
    scheduler: tuple[cst.Call, cst.Assign] | None = None
    statements: list[cst.Assign] = field(default_factory=list)
    loss: cst.BaseExpression | None = None
    accumulated: cst.BaseExpression | None = None
    flushes: bool = False
    clip: cst.BaseExpression | None = None
    evaluated: cst.BaseExpression | None = None
    saves: list[cst.Call] = field(default_factory=list)
    dropped: list[cst.CSTNode] = field(default_factory=list)


def held(fold: Fold) -> set[str]:
    """The names of the optimizer and the scheduler."""
    return targets(fold.optimizer[1]) | (targets(fold.scheduler[1]) if fold.scheduler else set())


def statements(block: cst.BaseSuite) -> list[cst.CSTNode]:
    """The statements of a block, those of one line one by one."""
    found: list[cst.CSTNode] = []
    for line in block.body:
        found += line.body if isinstance(line, cst.SimpleStatementLine) else [line]
    return found


def names(node: cst.CSTNode) -> set[str]:
    """The names that an expression or statement uses."""
    return {one.value for one in inside(node) if isinstance(one, cst.Name)}


def targets(node: cst.CSTNode) -> set[str]:
    """The names that an assignment binds; nothing where it binds something else."""
    if isinstance(node, cst.Assign):
        parts: list[cst.BaseExpression] = [one.target for one in node.targets]
    elif isinstance(node, (cst.AugAssign, cst.AnnAssign)):
        parts = [node.target]
    else:
        parts = []
    found: set[str] = set()
    for part in parts:
        elements = part.elements if isinstance(part, (cst.Tuple, cst.List)) else ()
        for one in [each.value for each in elements] or [part]:
            if not isinstance(one, cst.Name):
                return set()
            found.add(one.value)
    return found


def only_reports(plan: Plan, node: cst.CSTNode, held: set[str]) -> bool:
    """Return whether a statement does nothing but compute and tell figures.

    Args:
        plan: the program.
        node: the statement.
        held: names of the optimizer and the scheduler, of which only their rate may be asked.
    """
    if isinstance(node, cst.If):
        bodies = [node.body, *([node.orelse.body] if isinstance(node.orelse, cst.Else) else [])]
        simple = not isinstance(node.orelse, cst.If)
        return simple and all(
            only_reports(plan, one, held) for body in bodies for one in statements(body)
        )
    if isinstance(node, (cst.Assign, cst.AugAssign)):
        if not targets(node) and not _is_entry(node):
            return False
    elif not isinstance(node, (cst.Expr, cst.Pass)):
        return False
    for one in inside(node):
        if isinstance(one, (cst.Await, cst.Yield, cst.NamedExpr)):
            return False
        if isinstance(one, cst.Call) and not _is_harmless(plan, one, held):
            return False
    return True


def _is_entry(node: cst.Assign | cst.AugAssign) -> bool:
    """Return whether a statement fills an entry of a name: ``metrics["loss"] += …``."""
    target = node.target if isinstance(node, cst.AugAssign) else node.targets[0].target
    return isinstance(target, cst.Subscript) and isinstance(target.value, cst.Name)


def _is_bar(plan: Plan, node: cst.BaseExpression) -> bool:
    """Return whether an expression is a progress bar."""
    return all(
        isinstance(one, cst.Call) and plan.flow.names(one.func) & TQDM for one in trace(plan, node)
    )


def _is_harmless(plan: Plan, call: cst.Call, held: set[str]) -> bool:
    if plan.flow.names(call.func) & TQDM:
        return True
    if isinstance(call.func, cst.Attribute):
        if call.func.attr.value in _OF_BARS and _is_bar(plan, call.func.value):
            return True
        if plan.flow.names(call.func) & _FUNCTIONS:
            return True
        if call.func.attr.value == "get_last_lr":
            return True
        return call.func.attr.value in _METHODS and not names(call.func.value) & held
    return bool(plan.flow.names(call.func) & _FUNCTIONS)
