"""Horovod: its face and that of PyTorch are imported in their places."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import libcst as cst

from unipar.compat.horovod_names import CALLS, HOROVOD, PACKAGE, STARTED
from unipar.compat.tables import Table
from unipar.migrate.dialects.base import Row
from unipar.migrate.dialects.face import FaceDialect
from unipar.migrate.dialects.native import is_torch, rewrite_imports
from unipar.migrate.plan import Plan
from unipar.migrate.source import Source

_LAUNCHERS = ("horovod.spark.run", "horovod.ray.RayExecutor")


class Horovod(FaceDialect):
    """A script whose optimizer is wrapped in ``hvd.DistributedOptimizer``."""

    name: ClassVar[str] = "horovod"
    title: ClassVar[str] = "Horovod"
    marks: ClassVar[tuple[str, ...]] = ("horovod.",)
    trains: ClassVar[tuple[str, ...]] = ("horovod.torch.",)
    whole: ClassVar[str] = "unipar.compat.torch.whole_state_dict({model})"
    whole_state: ClassVar[str] = "unipar.compat.torch.whole_state_dict({optimizer})"
    package: ClassVar[str] = "horovod"
    face: ClassVar[str] = "unipar.compat.horovod"
    modules: ClassVar[Mapping[str, Table | None]] = {
        "": PACKAGE, "torch": HOROVOD, "torch.elastic": None,
    }  # fmt: skip
    calls: ClassVar[tuple[Table, ...]] = (CALLS,)
    rows: ClassVar[tuple[Row, ...]] = (
        Row("import horovod.torch as hvd", "import unipar.compat.horovod.torch as hvd"),
        Row("import torch", "import unipar.compat.torch as torch"),
    )

    def concerns(self, name: str) -> bool:
        return self.marked(name) or is_torch(name)

    def rewrite(self, plan: Plan) -> None:
        plan.launcher = "horovodrun"
        for _, call in plan.calls(*_LAUNCHERS):
            plan.refuse(call, *STARTED)
        super().rewrite(plan)
        for source in plan.sources:
            rewrite_imports(plan, source)

    def _rewrite_import(self, plan: Plan, source: Source, node: cst.Import) -> None:
        names = [source.code(alias.name) for alias in node.names if alias.asname is None]
        if "horovod.torch" in names:
            if len(node.names) > 1:
                plan.refuse(
                    node, "it imports more than horovod.torch, whose line takes another form.",
                    "Import horovod.torch on a line of its own.",
                )  # fmt: skip
            else:
                plan.replace(node, "from unipar.compat import horovod")
            return
        super()._rewrite_import(plan, source, node)
