"""Hugging Face Accelerate: its face is imported in its place, and the script stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from unipar.compat.accelerate_names import ACCELERATOR as MEMBERS
from unipar.compat.accelerate_names import CALLS, TOP, UTILS
from unipar.compat.tables import Table
from unipar.migrate.dialects.accelerate_files import ACCELERATOR, read_files
from unipar.migrate.dialects.base import Row
from unipar.migrate.dialects.face import FaceDialect
from unipar.migrate.plan import Plan

FACE = "unipar.compat.accelerate"
_UNLISTED = ("accelerator", "data_loader", "launchers", "local_sgd", "logging", "optimizer",
             "scheduler", "state", "tracking")  # fmt: skip
"""Modules of the face that have no table of their names."""


class Accelerate(FaceDialect):
    """A script that prepares its objects with an ``Accelerator``."""

    name: ClassVar[str] = "accelerate"
    title: ClassVar[str] = "Accelerate"
    marks: ClassVar[tuple[str, ...]] = ("accelerate.",)
    trains: ClassVar[tuple[str, ...]] = ACCELERATOR
    package: ClassVar[str] = "accelerate"
    face: ClassVar[str] = FACE
    modules: ClassVar[Mapping[str, Table | None]] = {
        "": TOP, "utils": UTILS, **dict.fromkeys(_UNLISTED),
    }  # fmt: skip
    members: ClassVar[Table | None] = MEMBERS
    main: ClassVar[tuple[str, ...]] = ACCELERATOR
    together: ClassVar[tuple[str, ...]] = ("save_state", "save_model")
    gathering: ClassVar[tuple[str, ...]] = ("get_state_dict",)
    whole: ClassVar[str] = "accelerator.get_state_dict(model)"
    whole_state: ClassVar[str] = "accelerator.save_state(directory)"
    calls: ClassVar[tuple[Table, ...]] = (CALLS,)
    rows: ClassVar[tuple[Row, ...]] = (
        Row("from accelerate import Accelerator", f"from {FACE} import Accelerator"),
        Row("from accelerate.utils import set_seed", f"from {FACE}.utils import set_seed"),
        Row("import accelerate", f"import {FACE} as accelerate"),
        Row("the file of accelerate config beside the script",
            "strategy, device and precision in unipar.yaml"),
    )  # fmt: skip

    def rewrite(self, plan: Plan) -> None:
        plan.launcher = "torchrun"
        super().rewrite(plan)
        built = plan.calls(*ACCELERATOR)
        if built:
            read_files(plan, built[0][1])
