"""Accelerate's functions and classes, and the imports that bring them in."""

from __future__ import annotations

import libcst as cst

from unipar.migrate.dialects.accelerate_places import answered
from unipar.migrate.dialects.accelerate_settings import ACCELERATOR, HOLDERS
from unipar.migrate.leftovers import Leftovers
from unipar.migrate.literals import argument, constant
from unipar.migrate.plan import Plan
from unipar.migrate.source import Source

_FUNCTIONS = {
    "accelerate.utils.set_seed": "set_seed",
    "accelerate.utils.random.set_seed": "set_seed",
    "accelerate.logging.get_logger": "get_logger",
    "accelerate.skip_first_batches": "skip_first_batches",
    "accelerate.data_loader.skip_first_batches": "skip_first_batches",
}

_LAUNCHERS = ("accelerate.notebook_launcher", "accelerate.launchers.notebook_launcher")
_IMPORTS = (cst.Import, cst.ImportFrom)


def rewrite_names(plan: Plan) -> None:
    """Rewrite what the package's names stand for, and take out its imports."""
    for source in plan.sources:
        for kind in (cst.Name, cst.Attribute):
            for node in source.all(kind):
                _rewrite_name(plan, source, node)
    Leftovers(plan, "accelerate").remove_imports()


def _rewrite_name(plan: Plan, source: Source, node: cst.BaseExpression) -> None:
    above = source.parent(node)
    inner = isinstance(above, cst.Attribute)
    names = {one for one in plan.flow.names(node) if f"{one}.".startswith("accelerate.")}
    if not names or inner or any(isinstance(one, _IMPORTS) for one in source.around(node)):
        return
    if any(answered(plan, one) for one in source.around(node)):
        return
    name = next(iter(names))
    call = above if isinstance(above, cst.Call) and above.func is node else None
    if name in _FUNCTIONS and call is not None:
        plan.handled.add(call)
        _check_function(plan, call, _FUNCTIONS[name])
        plan.replace(node, f"accelerated.{_FUNCTIONS[name]}")
    elif name in ACCELERATOR:
        if call is None:
            plan.replace(node, "accelerated.Run")
    elif name in _LAUNCHERS:
        plan.refuse(
            call or node, "a notebook's processes are Accelerate's to start.",
            "Call the function itself, which trains on one process; as a script torchrun starts "
            "it on several.",
        )  # fmt: skip
    elif call is None or name.rpartition(".")[2] not in HOLDERS:
        plan.refuse(
            call or node, f"`{name}` is Accelerate's own; unipar has no counterpart.",
            "Use what the Accelerator itself has for it, or leave it out.",
        )  # fmt: skip


def _check_function(plan: Plan, call: cst.Call, name: str) -> None:
    if name != "set_seed":
        return
    if argument(call, 2, "deterministic") is not None:
        plan.refuse(call, "deterministic algorithms are torch's to ask for.",
                    "Call torch.use_deterministic_algorithms(True).")  # fmt: skip
    if constant(argument(call, 1, "device_specific")) is True:
        plan.warn(
            call,
            "each rank has a seed of its own: dropout differs between ranks, and a run on "
            "another number of ranks is another run.",
            "Kept as it is; weights still begin equal, as rank 0's are taken.",
        )
