"""Averages of averages over unequal numbers of samples."""

from __future__ import annotations

from typing import NamedTuple

import libcst as cst

from unipar.migrate.expressions import Origin
from unipar.migrate.history import last_write
from unipar.migrate.literals import argument, constant
from unipar.migrate.loaders import LOADER
from unipar.migrate.numerics import is_number_of_ranks
from unipar.migrate.plan import Plan
from unipar.migrate.source import Source
from unipar.migrate.tree import inside

_UNWRAPPED = ("item", "detach", "cpu", "double", "float", "tolist", "numpy")
_MEANS = ("numpy.mean", "statistics.mean", "statistics.fmean")
_REDUCED = ("torch.distributed.all_reduce", "torch.distributed.reduce")


class _Sum(NamedTuple):
    """A name that means of batches are added or appended to, in a loop over a loader."""

    source: Source
    text: str
    batch: str
    listed: bool


def warn_of_means(plan: Plan) -> None:
    """Call out means of batches, or of ranks, that are averaged as if all were of equal size."""
    for one in _sums(plan):
        for place in _averages(plan, one):
            plan.warn(
                place,
                f"means of batches are averaged: a last batch of b samples counts as much as one "
                f"of {one.batch}, so each of its samples counts {one.batch}/b times as much as "
                f"others, up to {one.batch} times.",
                "Kept as it is; for the mean over samples, add mean * len(x), and divide by the "
                "number of samples.",
            )
    _warn_of_ranks(plan)


def _sums(plan: Plan) -> list[_Sum]:
    found: list[_Sum] = []
    for source in plan.sources:
        for add in source.all(cst.AugAssign):
            batch = _ragged(plan, source, add)
            if isinstance(add.operator, cst.AddAssign) and batch and _is_mean(
                plan, source, add.value
            ):  # fmt: skip
                found.append(_Sum(source, source.code(add.target), batch, False))
        for place, call, func in plan.methods("append"):
            if place is source and call.args and _is_mean(plan, source, call.args[0].value):
                batch = _ragged(plan, source, call)
                if batch:
                    found.append(_Sum(source, source.code(func.value), batch, True))
    return found


def _ragged(plan: Plan, source: Source, node: cst.CSTNode) -> str:
    """The size of the batches of the loop around a node; nothing where all are surely equal."""
    for loop in source.loops(node):
        if not isinstance(loop, cst.For):
            continue
        for one in _loaders(plan, loop.iter):
            assert isinstance(one.node, cst.Call)
            size = argument(one.node, 1, "batch_size")
            dropped = constant(argument(one.node, 8, "drop_last")) is True
            if size is None or dropped or constant(size) == 1:
                return ""
            return plan.flow.source(size).code(size)
    return ""


def _loaders(plan: Plan, node: cst.BaseExpression) -> list[Origin]:
    return [
        one for one in plan.flow.values(node)
        if one.name in LOADER and isinstance(one.node, cst.Call)
    ]  # fmt: skip


def _is_mean(plan: Plan, source: Source, node: cst.BaseExpression) -> bool:
    """Return whether a value is surely the mean over a batch."""
    for _ in range(10):
        if isinstance(node, (cst.Name, cst.Attribute)):
            if isinstance(node, cst.Attribute) and node.attr.value == "loss":
                return True  # As models of transformers give it.
            write = last_write(source, node)
            if write is None or write.operator is not None:
                return False
            node = write.value
        elif isinstance(node, cst.Call):
            name = node.func.attr.value if isinstance(node.func, cst.Attribute) else ""
            if name in _UNWRAPPED and isinstance(node.func, cst.Attribute):
                node = node.func.value
            elif "float" in plan.flow.names(node.func) and node.args:
                node = node.args[0].value
            else:
                return name == "mean" or _is_mean_loss(plan, node)
        else:
            return False
    return False


def _is_mean_loss(plan: Plan, call: cst.Call) -> bool:
    """Whether a call is of one of torch's losses, which are means unless asked not to be."""
    made = [one for one in plan.flow.values(call.func) if one.kind == "call"]
    names = plan.flow.names(call.func) | {one.name for one in made}
    built = [one.node for one in made if isinstance(one.node, cst.Call)]
    if any(argument(one, None, "reduction") is not None for one in (call, *built)):
        return False
    return any(
        (name.startswith("torch.nn.functional.") and name.endswith(("loss", "entropy", "logits")))
        or (name.startswith("torch.nn.") and name.endswith("Loss"))
        for name in names
    )


def _averages(plan: Plan, one: _Sum) -> list[cst.CSTNode]:
    """Where such a sum is divided by the number of batches."""
    source, found = one.source, []
    for node in source.all(cst.BinaryOperation):
        if not isinstance(node.operator, cst.Divide):
            continue
        left = node.left
        if one.listed and isinstance(left, cst.Call) and "sum" in plan.flow.names(left.func):
            summed = left.args[0].value if left.args else left
            counted = _len(plan, node.right)
            if source.code(summed) == one.text and counted is not None:
                found += [node] if source.code(counted) == one.text else []
        elif not one.listed and source.code(left) == one.text:
            counted = _len(plan, node.right)
            found += [node] if counted is not None and _loaders(plan, counted) else []
    for divide in source.all(cst.AugAssign):
        counted = _len(plan, divide.value)
        if (
            isinstance(divide.operator, cst.DivideAssign)
            and source.code(divide.target) == one.text
            and counted is not None
            and _loaders(plan, counted)
        ):
            found.append(divide)
    for place, call in plan.calls(*_MEANS):
        if place is source and one.listed and call.args:
            found += [call] if source.code(call.args[0].value) == one.text else []
    return found


def _len(plan: Plan, node: cst.BaseExpression) -> cst.BaseExpression | None:
    """What the length is of; through ``max(1, len(loader))``."""
    for call in inside(node):
        if isinstance(call, cst.Call) and "len" in plan.flow.names(call.func) and call.args:
            return call.args[0].value
    return None


def _warn_of_ranks(plan: Plan) -> None:
    if not any(_is_strided(plan, one) for source in plan.sources for one in _steps(source)):
        return
    for source in plan.sources:
        reduced = {
            source.code(call.args[0].value)
            for place, call in plan.calls(*_REDUCED) if place is source and call.args
        }  # fmt: skip
        quotients = [
            (one, one.left, one.right) for one in source.all(cst.BinaryOperation)
            if isinstance(one.operator, cst.Divide)
        ]  # fmt: skip
        quotients += [
            (one, one.target, one.value) for one in source.all(cst.AugAssign)
            if isinstance(one.operator, cst.DivideAssign)
        ]  # fmt: skip
        for place, left, right in quotients:
            text = source.code(left).removesuffix(".item()")
            if text in reduced and is_number_of_ranks(plan, right):
                plan.warn(
                    place,
                    "means of ranks are averaged, whose shares of the data differ by a sample: of "
                    "n samples on k ranks those of the smaller shares count ceil(n/k) / floor(n/k) "
                    "times as much as others (51/50 of 101 samples on 2 ranks, twice of 3).",
                    "Kept as it is; reduce sums and numbers of samples, and divide them.",
                )


def _steps(source: Source) -> list[cst.BaseExpression]:
    """What sequences are cut by: the steps of slices, and the third argument of ``range``."""
    found = [one.step for one in source.all(cst.Slice) if one.step is not None]
    return found + [one.args[2].value for one in source.all(cst.Call) if len(one.args) == 3]


def _is_strided(plan: Plan, step: cst.BaseExpression) -> bool:
    return is_number_of_ranks(plan, step)
