"""What changes training in ways that scripts do not say, with the numerical effect."""

from __future__ import annotations

import libcst as cst

from unipar.migrate.literals import argument
from unipar.migrate.models import is_optimizer
from unipar.migrate.plan import Plan
from unipar.migrate.tree import inside

_SIZE = ("torch.distributed.get_world_size", "horovod.torch.size")
_RANK = ("torch.distributed.get_rank", "horovod.torch.rank", "horovod.torch.local_rank")
_SEED = ("torch.manual_seed", "torch.cuda.manual_seed", "torch.cuda.manual_seed_all",
         "random.seed", "numpy.random.seed")  # fmt: skip


def warn_of_ranks(plan: Plan) -> None:
    """Call out what depends on the number of ranks, or differs between them."""
    for _, call in plan.calls(*_SEED):
        if call.args and _mentions(plan, call.args[0].value, _RANK, "rank"):
            plan.warn(
                call,
                "each rank has a seed of its own: dropout and shuffling differ between ranks, "
                "and a run on another number of ranks is another run.",
                "Kept as it is; weights still begin equal, as rank 0's are taken.",
            )
    for source in plan.sources:
        for call in source.all(cst.Call):
            values = plan.flow.values(call)
            if not any(one.node is call and is_optimizer(one) for one in values):
                continue
            rate = argument(call, 1, "lr")
            if rate is not None and _mentions(plan, rate, _SIZE, "world_size"):
                plan.warn(
                    call,
                    "the learning rate is multiplied by the number of ranks: on 2 ranks it is "
                    "twice, on 8 ranks eight times that on one.",
                    "Kept as it is; with another strategy on as many ranks it stays the same.",
                )


def _mentions(plan: Plan, node: cst.CSTNode, made_by: tuple[str, ...], name: str) -> bool:
    return any(
        (isinstance(one, cst.Name) and one.value.endswith(name))
        or plan.made_by(plan.flow.values(one), *made_by)
        for one in inside(node)
    )
