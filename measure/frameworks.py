"""The frameworks that are surveyed: each in processes, or an environment, of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from unipar.testing import PRELOAD

ROOT = Path(__file__).resolve().parent.parent


class Framework(NamedTuple):
    """What is imported together.

    Attributes:
        name: the framework's.
        package: its distribution on PyPI.
        environment: the folder of its virtual environment, below the root.
        strategies: the strategies that it brings, as ``--strategy`` takes them.
        half_only: those that have no fp32.
        preload: imports it, as ``module:function``; the ranks of pools begin so.
        layouts: strategies whose ranks divide more than data, with the numbers of ranks that they
            can be on; the first is where they save.
        axes: one strategy for each axis that divides more than data; what they hold is measured
            by ``layouts.py``, on models that each axis divides.
    """

    name: str
    package: str
    environment: str
    strategies: tuple[str, ...]
    half_only: tuple[str, ...] = ()
    preload: str = ""
    layouts: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    axes: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        """Every strategy by its name."""
        return (*self.strategies, *self.half_only, *self.layouts)

    def ask(self, module: str, question: Any) -> Any:
        """What ``module`` answers in the framework's environment, by :func:`answer`.

        Raises:
            SystemExit: the environment is missing, or the module failed; its own output says why.
        """
        python = ROOT / self.environment / "bin" / "python"
        if not python.exists():
            sys.exit(f"There is no {python}: make test sets it up.")
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory, "answer.json")
            command = [str(python), "-m", module, json.dumps(question), str(file)]
            environment = os.environ | ({PRELOAD: self.preload} if self.preload else {})
            if subprocess.run(command, cwd=ROOT, env=environment).returncode:
                sys.exit(f"{self.name}: {module} failed.")
            return json.loads(file.read_text())


FRAMEWORKS = (
    Framework(
        *("PyTorch", "torch", ".venv", ("single", "ddp", "fsdp")),
        # Its buffer changes where the last stage is.
        layouts={
            "mesh:tp=2": (2, 4),
            "mesh:pp=2,stages=[[embedding,position,blocks.0],[blocks.1,head,calls]]": (2,),
        },
        axes=("mesh:tp=2", "mesh:pp=2", "mesh:cp=2", "mesh:ep=2"),
    ),
    Framework(
        "DeepSpeed",
        "deepspeed",
        ".venv",
        ("zero1", "zero2", "zero3"),
        preload="unipar_deepspeed.framework:load",
    ),
    Framework("Horovod", "horovod", ".venv", ("horovod",)),
    Framework(
        "Accelerate",
        "accelerate",
        ".venv",
        ("accelerate", "accelerate:plugin=deepspeed"),
        preload="unipar_accelerate.framework:load",
    ),
    Framework(
        "Colossal-AI",
        "colossalai",
        ".venv-colossalai",
        (
            *("colossalai:plugin=ddp", "colossalai:plugin=fsdp"),
            *("colossalai:plugin=zero1", "colossalai:plugin=zero2"),
        ),
        ("colossalai:plugin=gemini",),
        preload="unipar_colossalai.framework:load",
    ),
)


def answer(fn: Callable[[Any], Any]) -> None:
    """What the main module of an environment does: ``fn`` answers the question of the caller."""
    question, file = sys.argv[1:]
    Path(file).write_text(json.dumps(fn(json.loads(question))))
