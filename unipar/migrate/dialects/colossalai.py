"""Colossal-AI: its face is imported in its place, and the script stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from unipar.compat.colossalai_names import BOOSTER as MEMBERS
from unipar.compat.colossalai_names import CALLS, MODULES, OPTIMIZER, PLUGIN
from unipar.compat.tables import Table
from unipar.migrate.dialects.base import Row
from unipar.migrate.dialects.face import FaceDialect
from unipar.migrate.plan import Plan

FACE = "unipar.compat.colossalai"
BOOSTER = ("colossalai.booster.Booster", "colossalai.booster.booster.Booster")


class ColossalAI(FaceDialect):
    """A script that boosts its model."""

    name: ClassVar[str] = "colossalai"
    title: ClassVar[str] = "Colossal-AI"
    marks: ClassVar[tuple[str, ...]] = ("colossalai.",)
    trains: ClassVar[tuple[str, ...]] = BOOSTER
    package: ClassVar[str] = "colossalai"
    face: ClassVar[str] = FACE
    modules: ClassVar[Mapping[str, Table | None]] = {**MODULES, "initialize": None}
    members: ClassVar[Table | None] = MEMBERS
    main: ClassVar[tuple[str, ...]] = BOOSTER
    together: ClassVar[tuple[str, ...]] = ("save_model", "save_optimizer", "save_lr_scheduler")
    whole: ClassVar[str] = "booster.save_model(model, path)"
    whole_state: ClassVar[str] = "booster.save_optimizer(optimizer, path)"
    calls: ClassVar[tuple[Table, ...]] = (CALLS, PLUGIN, OPTIMIZER)
    rows: ClassVar[tuple[Row, ...]] = (
        Row("import colossalai", f"import {FACE} as colossalai"),
        Row("from colossalai.booster import Booster", f"from {FACE}.booster import Booster"),
        Row(
            "from colossalai.booster.plugin.gemini_plugin import GeminiPlugin",
            f"from {FACE}.booster.plugin import GeminiPlugin",
        ),
    )  # fmt: skip

    def rewrite(self, plan: Plan) -> None:
        plan.launcher = "torchrun"
        super().rewrite(plan)
