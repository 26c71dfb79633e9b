"""Starting and joining processes: the run does so in place of the script."""

from __future__ import annotations

from datetime import timedelta

import libcst as cst

from unipar.migrate.literals import argument, constant
from unipar.migrate.plan import Plan
from unipar.migrate.source import Source
from unipar.migrate.tree import inside

INIT = ("torch.distributed.init_process_group",
        "torch.distributed.distributed_c10d.init_process_group")  # fmt: skip


def rewrite_group(plan: Plan, *, spawned: bool) -> bool:
    """Open and close the run where the script joins and leaves the process group.

    Returns:
        Whether it is seen to join one.
    """
    found = plan.calls(*INIT)
    for source, call in found:
        check_condition(plan, source, call)
        method = constant(argument(call, 1, "init_method"))
        if not spawned and (method or "env://") != "env://":
            plan.refuse(
                call, "the processes meet at a place of their own.",
                "Start them with torchrun, srun or mpirun, and leave init_method out.",
            )  # fmt: skip
        elif not spawned and (argument(call, 3, "world_size") or argument(call, 4, "rank")):
            _check_place(plan, call)
        _keep_timeout(plan, call)
        plan.replace(call, "script.open()")
    for _, call in plan.calls("torch.distributed.destroy_process_group"):
        plan.replace(call, "script.close()")
    for _, call in plan.calls("torch.distributed.new_group"):
        refuse_groups(plan, call)
    return bool(found)


def _keep_timeout(plan: Plan, call: cst.Call) -> None:
    """Put how long collectives wait into the settings."""
    given = argument(call, 2, "timeout")
    if given is None:
        return
    if isinstance(given, cst.Call) and "datetime.timedelta" in plan.flow.names(given.func):
        parts = {one.keyword.value: constant(one.value) for one in given.args if one.keyword}
        if len(parts) == len(given.args) and all(isinstance(one, int) for one in parts.values()):
            plan.set(call, "timeout", timedelta(**parts).total_seconds())
            return
    plan.tell(
        given, "collectives wait for 1800 seconds, unless unipar.yaml says otherwise.",
        "Set timeout there, in seconds.",
    )  # fmt: skip


def refuse_groups(plan: Plan, call: cst.Call) -> None:
    """Note that ranks are divided into groups of the script's own."""
    plan.refuse(
        call, "groups of ranks are for other divisions than data parallelism's.",
        "Port this by hand (docs/how-to/own-loop.md).",
    )  # fmt: skip


def check_condition(plan: Plan, source: Source, call: cst.Call) -> None:
    """Tell what becomes of ``if distributed:``, and refuse what only some ranks would do."""
    if on_some_ranks(plan, source, call):
        plan.refuse(
            call,
            "only some ranks come to it, as far as can be seen.",
            "Ask for the number of processes instead (world_size > 1), or call it always.",
        )
    elif is_conditional(source, call):
        plan.tell(
            call,
            "the run is joined in any case: without a launcher it is one process, as before, and "
            "with one all of its processes train together, whatever the condition says.",
        )


def is_conditional(source: Source, node: cst.CSTNode) -> bool:
    """Return whether code of the function decides if a node is reached; the main guard is none."""
    for above in source.around(node):
        if isinstance(above, cst.FunctionDef):
            return False
        if isinstance(above, cst.IfExp):
            return True
        if isinstance(above, cst.If) and "__name__" not in source.code(above.test):
            return True
    return False


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


def _check_place(plan: Plan, call: cst.Call) -> None:
    for name, index in (("world_size", 3), ("rank", 4)):
        given = argument(call, index, name)
        if given is None:
            continue
        text = plan.flow.source(given).code(given).lower()
        known = any(one.name == "int" for one in plan.flow.values(given))
        if not known and "environ" not in text:
            plan.refuse(
                call,
                f"{name} is the script's own, which unipar cannot ask it for.",
                "Start it with torchrun, srun or mpirun, and leave rank and world_size out.",
            )
