"""Notes on changes of training that a script does not show, with their numerical effect."""

from __future__ import annotations

from typing import Literal

import libcst as cst

from unipar.migrate.history import behind
from unipar.migrate.literals import argument, constant
from unipar.migrate.loaders import SAMPLER
from unipar.migrate.models import is_optimizer
from unipar.migrate.plan import Plan
from unipar.migrate.source import Source

_SIZE = ("torch.distributed.get_world_size", "horovod.torch.size")
_RANK = ("torch.distributed.get_rank", "horovod.torch.rank", "horovod.torch.local_rank")
_SEED = ("torch.manual_seed", "torch.cuda.manual_seed", "torch.cuda.manual_seed_all",
         "random.seed", "random.Random", "numpy.random.seed", "numpy.random.default_rng",
         "transformers.set_seed", "accelerate.utils.set_seed")  # fmt: skip
_SIZES = ("world_size", "num_replicas")
_ROOTS = ("math.sqrt", "numpy.sqrt", "torch.sqrt")
How = Literal["times", "root", "part"]
_EFFECT: dict[How, str] = {
    "times": "multiplied by the number of ranks: on 2 ranks it is twice, on 8 ranks eight times "
    "that on one.",
    "root": "multiplied by the square root of the number of ranks: on 2 ranks it is 1.41 times, "
    "on 8 ranks 2.83 times that on one.",
    "part": "divided by the number of ranks: on 2 ranks it is a half, on 8 ranks an eighth of "
    "that on one.",
}


def warn_of_ranks(plan: Plan) -> None:
    """Call out what depends on the number of ranks, or differs between them."""
    _warn_of_seeds(plan)
    for source in plan.sources:
        for call in source.all(cst.Call):
            values = plan.flow.values(call)
            if not any(one.node is call and is_optimizer(one) for one in values):
                continue
            rate = argument(call, 1, "lr")
            if rate is not None:
                _warn_of_rate(plan, call, _scaled(plan, rate))
        for one in (*source.all(cst.Assign), *source.all(cst.AugAssign)):
            target = one.target if isinstance(one, cst.AugAssign) else one.targets[0].target
            if isinstance(target, cst.Subscript) and _key(target) == "lr":
                _warn_of_rate(plan, one, _scaled(plan, one.value, one))


def is_number_of_ranks(plan: Plan, node: cst.CSTNode) -> bool:
    """Return whether an expression is the number of ranks, as far as can be seen."""
    if isinstance(node, cst.Name) and node.value.endswith(_SIZES):
        return True
    if isinstance(node, cst.Attribute) and node.attr.value.endswith(_SIZES):
        return True
    return plan.made_by(plan.flow.values(node), *_SIZE)


def seeds_of_ranks(plan: Plan) -> list[cst.Call]:
    """The calls that give each rank a seed of its own."""
    seeds = plan.calls(*_SEED)
    seeds += [
        (source, call) for source, call, func in plan.methods("manual_seed")
        if plan.made_by(plan.flow.values(func.value), "torch.Generator")
    ]  # fmt: skip
    return [
        call for source, call in seeds
        if call.args and _of_rank(plan, source, call.args[0].value)
    ]  # fmt: skip


def _warn_of_seeds(plan: Plan) -> None:
    for call in seeds_of_ranks(plan):
        plan.warn(
            call,
            "each rank has a seed of its own: dropout and shuffling differ between ranks, "
            "and a run on another number of ranks is another run.",
            "Kept as it is; weights still begin equal, as rank 0's are taken.",
        )
    for source, call in plan.calls(*SAMPLER):
        seed = argument(call, 4, "seed")
        shuffled = constant(argument(call, 3, "shuffle")) is not False
        if seed is not None and shuffled and _of_rank(plan, source, seed):
            plan.warn(
                call,
                "each rank shuffles with a seed of its own, so ranks' shares overlap: of an "
                "epoch's samples 1/4 are seen by no rank of 2, and about 1/3 by none of 8, others "
                "several times.",
                "Kept as it is; give all ranks one seed.",
            )


def _of_rank(plan: Plan, source: Source, node: cst.BaseExpression) -> bool:
    """Return whether a rank is part of a number: ``seed + rank``."""
    for one in behind(plan, node):
        if isinstance(one, cst.Name) and (one.value == "rank" or one.value.endswith("_rank")):
            return True
        if plan.made_by(plan.flow.values(one), *_RANK):
            return True
    return False


def _key(node: cst.Subscript) -> object:
    index = node.slice[0].slice
    return constant(index.value) if isinstance(index, cst.Index) else None


def _warn_of_rate(plan: Plan, node: cst.CSTNode, how: How | None) -> None:
    if how is not None:
        plan.warn(
            node,
            f"the learning rate is {_EFFECT[how]}",
            "Kept as it is; with another strategy on as many ranks it stays the same.",
        )


def _scaled(
    plan: Plan, rate: cst.BaseExpression, statement: cst.CSTNode | None = None
) -> How | None:
    """How a learning rate depends on the number of ranks."""
    first = [statement] if statement is not None else []
    for one in (*first, *behind(plan, rate)):
        source = plan.flow.source(one)
        if isinstance(one, cst.AugAssign) and is_number_of_ranks(plan, one.value):
            if isinstance(one.operator, cst.MultiplyAssign):
                return "times"
            if isinstance(one.operator, cst.DivideAssign):
                return "part"
        if is_number_of_ranks(plan, one) and isinstance(one, cst.BaseExpression):
            how = _used_as(plan, source, one)
            if how is not None:
                return how
    return None


def _used_as(plan: Plan, source: Source, size: cst.BaseExpression) -> How | None:
    """Describe what is done with the number of ranks in an expression."""
    how: How | None = None
    inner: cst.CSTNode = size
    for above in source.around(size):
        if isinstance(above, cst.Call) and plan.flow.names(above.func) & set(_ROOTS):
            return "root"
        if isinstance(above, (cst.BaseSmallStatement, cst.Comparison, cst.Subscript)):
            break
        if isinstance(above, cst.IfExp) and inner is above.test:
            return None
        if isinstance(above, cst.BinaryOperation):
            if isinstance(above.operator, cst.Power) and constant(above.right) == 0.5:
                return "root"
            if isinstance(above.operator, cst.Divide) and inner is above.right:
                how = how or "part"
            elif isinstance(above.operator, (cst.Divide, cst.Multiply)):
                how = how or "times"
        inner = above
    return how
