"""PyTorch's own ways to train: its face is imported in its place, and the script stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import libcst as cst

from unipar.compat.torch_names import FACE, REFUSED, REPLACED, holds_face
from unipar.migrate.dialects.base import Dialect, Row
from unipar.migrate.plan import Plan
from unipar.migrate.source import Source

_IMPORTS = (
    Row("import torch", f"import {FACE} as torch"),
    Row("from torch import nn", f"from {FACE} import nn"),
    Row("import torch.distributed as dist", f"import {FACE}.distributed as dist"),
    Row("from torch.nn.parallel import DistributedDataParallel as DDP",
        f"from {FACE}.nn.parallel import DistributedDataParallel as DDP"),
)  # fmt: skip


class Native(Dialect):
    """A script that trains by PyTorch's own calls.

    Attributes:
        starts: what starts the script, if it does not start its processes itself.
    """

    rows: ClassVar[tuple[Row, ...]] = _IMPORTS
    refused: ClassVar[tuple[Row, ...]] = tuple(
        Row(row.names.replace(" ", "`, `"), row.why) for row in REFUSED.rows
    )
    starts: ClassVar[str] = "torchrun"
    whole: ClassVar[str] = "unipar.compat.torch.whole_state_dict({model})"
    whole_state: ClassVar[str] = "unipar.compat.torch.whole_state_dict({optimizer})"

    def concerns(self, name: str) -> bool:
        return is_torch(name)

    def rewrite(self, plan: Plan) -> None:
        spawned = plan.calls("torch.multiprocessing.spawn", "torch.multiprocessing.Process")
        plan.launcher = "python" if spawned else self.starts
        if not plan.methods("backward"):
            return
        for source in plan.sources:
            rewrite_imports(plan, source)


class Torch(Native):
    """A script that trains on one device."""

    name: ClassVar[str] = "torch"
    title: ClassVar[str] = "plain PyTorch"
    marks: ClassVar[tuple[str, ...]] = ("torch.",)
    trains: ClassVar[tuple[str, ...]] = ()
    starts: ClassVar[str] = "python"


class Ddp(Native):
    """A script that wraps its model in DistributedDataParallel."""

    name: ClassVar[str] = "ddp"
    title: ClassVar[str] = "DistributedDataParallel"
    marks: ClassVar[tuple[str, ...]] = (
        "torch.distributed.init_process_group",
        "torch.distributed.distributed_c10d.init_process_group",
        "torch.nn.parallel.DistributedDataParallel",
        "torch.nn.parallel.distributed.DistributedDataParallel",
    )
    trains: ClassVar[tuple[str, ...]] = marks[2:]


class Fsdp(Native):
    """A script that divides its model by FullyShardedDataParallel or ``fully_shard``."""

    name: ClassVar[str] = "fsdp"
    title: ClassVar[str] = "FSDP"
    whole: ClassVar[str] = ""  # Its state_dict() is called on all ranks, and is whole.
    whole_state: ClassVar[str] = ""
    marks: ClassVar[tuple[str, ...]] = (
        "torch.distributed.fsdp.",
        "torch.distributed._composable.fsdp.",
    )
    trains: ClassVar[tuple[str, ...]] = (
        "torch.distributed.fsdp.FullyShardedDataParallel",
        "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
        "torch.distributed.fsdp.fully_shard",
        "torch.distributed._composable.fsdp.fully_shard",
    )


def rewrite_imports(plan: Plan, source: Source) -> None:
    """Import the face where a file imports what it replaces, or PyTorch itself.

    Args:
        plan: the program.
        source: a file of it.
    """
    for node in source.all(cst.ImportFrom):
        if node.module is None or node.relative:
            continue
        module = source.code(node.module)
        if is_torch(module) and _has_face(module, node, source.code):
            plan.replace(node.module, _faced(module))
    imports = list(source.all(cst.Import))
    plain = {source.block(node) for node in imports for alias in node.names
             if source.code(alias.name) == "torch" and alias.asname is None}  # fmt: skip
    for node in imports:
        _rewrite_import(plan, source, node, plain)


def _rewrite_import(
    plan: Plan, source: Source, node: cst.Import, plain: set[cst.CSTNode]
) -> None:  # fmt: skip
    """Rewrite one.

    Args:
        plan: the program.
        source: its file.
        node: the statement.
        plain: blocks that import torch itself, and so have its name, as have those within.
    """
    for alias in node.names:
        module = source.code(alias.name)
        if not is_torch(module):
            continue
        if alias.asname is not None:
            if holds_face(module):
                plan.replace(alias.name, _faced(module))
        elif module == "torch" or plain.isdisjoint(source.around(node)):
            # What follows in the name is found when it is asked for.
            plan.replace(alias, f"{FACE} as torch")
            plain.add(source.block(node))
        elif len(node.names) == 1:
            source.remove(node)
        else:
            plan.replace(alias, f"{FACE} as torch")


def _has_face(module: str, node: cst.ImportFrom, code: Callable[[cst.CSTNode], str]) -> bool:
    if isinstance(node.names, cst.ImportStar):
        return holds_face(module)
    names = {code(alias.name) for alias in node.names}
    replaced = set(REPLACED.get(module, ("", ""))[1].split())
    return bool(names & replaced) or any(holds_face(f"{module}.{name}") for name in names)


def is_torch(module: str) -> bool:
    """Return whether a module is PyTorch's."""
    return module == "torch" or module.startswith("torch.")


def _faced(module: str) -> str:
    return FACE + module.removeprefix("torch")
