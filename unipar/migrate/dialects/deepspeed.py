"""DeepSpeed: its face is imported in its place, and the script stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from unipar.compat.deepspeed_names import (
    ACCELERATOR,
    ADAM,
    CALLS,
    CHECKPOINTING,
    COMM,
    CONFIG,
    ENGINE,
    MOE,
    OPS,
    OPTIMIZER,
    PIPE,
    RUNTIME,
    SCHEDULES,
    TOP,
    UTILS,
    ZERO,
    ZERO_MODULE,
)
from unipar.compat.tables import Table
from unipar.migrate.dialects.base import Row
from unipar.migrate.dialects.face import FaceDialect
from unipar.migrate.plan import Plan

FACE = "unipar.compat.deepspeed"
_ENGINE = "deepspeed.engine"


class DeepSpeed(FaceDialect):
    """A script whose model ``deepspeed.initialize`` takes."""

    name: ClassVar[str] = "deepspeed"
    title: ClassVar[str] = "DeepSpeed"
    marks: ClassVar[tuple[str, ...]] = ("deepspeed.",)
    trains: ClassVar[tuple[str, ...]] = ("deepspeed.initialize",)
    engines: ClassVar[tuple[str, ...]] = (_ENGINE,)
    package: ClassVar[str] = "deepspeed"
    face: ClassVar[str] = FACE
    modules: ClassVar[Mapping[str, Table | None]] = {
        "": TOP, "accelerator": None, "checkpointing": CHECKPOINTING, "comm": COMM, "moe": MOE,
        "ops": OPS, "ops.adam": ADAM, "pipe": PIPE, "runtime": RUNTIME,
        "runtime.activation_checkpointing": None,
        "runtime.activation_checkpointing.checkpointing": CHECKPOINTING,
        "runtime.lr_schedules": SCHEDULES, "runtime.zero": ZERO_MODULE, "utils": UTILS,
    }  # fmt: skip
    members: ClassVar[Table | None] = ENGINE
    inner: ClassVar[Mapping[str, tuple[str, Table]]] = {
        "optimizer": ("deepspeed.optimizer", OPTIMIZER)
    }
    main: ClassVar[tuple[str, ...]] = (_ENGINE,)
    together: ClassVar[tuple[str, ...]] = ("save_checkpoint", "save_16bit_model")
    whole: ClassVar[str] = "engine.save_16bit_model(directory)"
    calls: ClassVar[tuple[Table, ...]] = (CALLS, CONFIG, ZERO, ACCELERATOR)
    rows: ClassVar[tuple[Row, ...]] = (
        Row("import deepspeed", f"import {FACE} as deepspeed"),
        Row("import deepspeed.comm as dist", f"import {FACE}.comm as dist"),
        Row("from deepspeed.ops.adam import FusedAdam", f"from {FACE}.ops.adam import FusedAdam"),
        Row("from deepspeed.accelerator import get_accelerator",
            f"from {FACE}.accelerator import get_accelerator"),
        Row("a configuration, as a dict or a file",
            "unchanged; read when the run begins, and unipar.yaml wins over it"),
    )  # fmt: skip

    def rewrite(self, plan: Plan) -> None:
        plan.launcher = "torchrun"
        super().rewrite(plan)
