"""Hugging Face Accelerate: its face is imported in its place, and the script stays as it is."""

from __future__ import annotations

from typing import ClassVar

import libcst as cst

from unipar.compat.accelerate_names import ACCELERATOR as MEMBERS
from unipar.compat.accelerate_names import CALLS, TOP, UTILS
from unipar.migrate.dialects.accelerate_files import ACCELERATOR, read_files
from unipar.migrate.dialects.base import Dialect, Row
from unipar.migrate.divisions import warn_of_divisions
from unipar.migrate.literals import constant
from unipar.migrate.models import find_optimizers
from unipar.migrate.plan import Plan
from unipar.migrate.rank_divergence import refuse_lone_saves
from unipar.migrate.source import Source
from unipar.migrate.tracing import keywords

FACE = "unipar.compat.accelerate"
_HERE = ("", "utils", "accelerator", "data_loader", "local_sgd", "logging", "optimizer",
         "scheduler", "state", "tracking")  # fmt: skip
"""The modules that the face has."""


class Accelerate(Dialect):
    """A script that prepares its objects with an ``Accelerator``."""

    name: ClassVar[str] = "accelerate"
    title: ClassVar[str] = "Accelerate"
    marks: ClassVar[tuple[str, ...]] = ("accelerate.",)
    rows: ClassVar[tuple[Row, ...]] = (
        Row("from accelerate import Accelerator", f"from {FACE} import Accelerator"),
        Row("from accelerate.utils import set_seed", f"from {FACE}.utils import set_seed"),
        Row("import accelerate", f"import {FACE} as accelerate"),
        Row("the file of accelerate config beside the script",
            "strategy, device and precision in unipar.yaml"),
    )  # fmt: skip
    refused: ClassVar[tuple[Row, ...]] = tuple(
        Row(row.names.replace(" ", "`, `"), row.why)
        for table in (CALLS, MEMBERS, TOP, UTILS)
        for row in table.rows
        if row.fate == "refused"
    )

    def rewrite(self, plan: Plan) -> None:
        plan.launcher = "torchrun"
        for source in plan.sources:
            for node in source.all(cst.ImportFrom):
                _rewrite_from(plan, source, node)
            for node in source.all(cst.Import):
                _rewrite_import(plan, source, node)
        find_optimizers(plan)
        built = plan.calls(*ACCELERATOR)
        if built:
            read_files(plan, built[0][1])
        refuse_lone_saves(plan, ("save_state", "save_model"), *ACCELERATOR)
        _refuse_members(plan)
        _warn_of_double_division(plan, [call for _, call in built])


def _rewrite_from(plan: Plan, source: Source, node: cst.ImportFrom) -> None:
    if node.module is None or node.relative:
        return
    module = source.code(node.module)
    if module.partition(".")[0] != "accelerate":
        return
    inside = module.partition(".")[2]
    table = TOP if not inside else UTILS if inside.partition(".")[0] == "utils" else None
    listed = () if isinstance(node.names, cst.ImportStar) else node.names
    for alias in listed:
        name = source.code(alias.name)
        row = table.find(name) if table is not None else None
        if row is not None and row.fate == "refused" and not (inside == "" and name in _HERE):
            plan.refuse(alias, f"the face has no {name}.", row.why)
    if inside.partition(".")[0] not in _HERE or (not inside and not listed):
        plan.refuse(
            node, f"the face has no accelerate{'.' if inside else ''}{inside}.",
            "Import names from accelerate or accelerate.utils.",
        )  # fmt: skip
    # What accelerate.utils is made of is one module here.
    short = inside.partition(".")[0]
    plan.replace(node.module, f"{FACE}.{short}" if short else FACE)


def _rewrite_import(plan: Plan, source: Source, node: cst.Import) -> None:
    for alias in node.names:
        module = source.code(alias.name)
        if module.partition(".")[0] != "accelerate":
            continue
        if alias.asname is not None:
            plan.replace(alias.name, f"{FACE}{module.removeprefix('accelerate')}")
        elif module == "accelerate":
            plan.replace(alias, f"{FACE} as accelerate")
        else:
            plan.refuse(
                node, f"import {module} binds the name accelerate.",
                f"Write import accelerate, or from {module} import ….",
            )  # fmt: skip


def _refuse_members(plan: Plan) -> None:
    """Refuse, where it can be seen, what the face refuses when it is called."""
    names = [
        name
        for row in MEMBERS.rows
        if row.fate == "refused"
        for name in row.names.split()
        if "*" not in name
    ]
    for _, call, func in plan.methods(*names):
        if plan.made_by(plan.flow.values(func.value), *ACCELERATOR):
            row = MEMBERS.find(func.attr.value)
            assert row is not None
            plan.refuse(call, f"the face refuses {func.attr.value}.", row.why)


def _warn_of_double_division(plan: Plan, built: list[cst.Call]) -> None:
    """Call out losses that the script divides, and ``accelerator.backward`` divides too."""
    if all(_accumulates_nothing(plan, call) for call in built):
        return
    losses = [
        (plan.flow.source(call), call, call.args[0].value)
        for _, call, func in plan.methods("backward")
        if call.args and plan.made_by(plan.flow.values(func.value), *ACCELERATOR)
    ]
    warn_of_divisions(plan, losses, divided_by="accelerator.backward")


def _accumulates_nothing(plan: Plan, call: cst.Call) -> bool:
    given = keywords(plan, call)
    if given is None or "gradient_accumulation_plugin" in given:
        return False
    return all(constant(one) == 1 for one in given.get("gradient_accumulation_steps", ()))
