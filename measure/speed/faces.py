"""Measure each face beside the framework that it stands for, in turns: ``make bench-faces``.

The same script runs under the framework, and as ``unipar migrate`` changes it under the face, with
the strategy that the script asks for. Figures go to docs/migrate/faces.json.

python measure/speed/faces.py            everything, in about a quarter of an hour
python measure/speed/faces.py --quick    a few turns of each, to see that it runs
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

# Before torch is imported: threads of its own would compete with the other processes.
os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from measure.frameworks import Framework  # noqa: E402
from measure.report import Row, circumstances, milliseconds, table  # noqa: E402
from measure.speed.timing import BASELINE  # noqa: E402
from unipar.benchmark.load import of_others, usage  # noqa: E402

FIGURES = ROOT / "docs" / "migrate" / "faces.json"
AIM = 1.02


class Face(NamedTuple):
    """A face, and how its framework is brought up.

    Attributes:
        framework: with its distribution and environment; ``preload`` imports it.
        script: in measure/scripts.
        around: a context that the framework's own run needs.
        settings: variables of the face's environment.
        again: whether the framework runs beside itself, too, to show what noise is.
    """

    framework: Framework
    script: str
    around: str = ""
    settings: Mapping[str, str] = MappingProxyType({})
    again: bool = False


def _framework(name: str, package: str, preload: str, environment: str = ".venv") -> Framework:
    return Framework(name, package, environment, (), preload=preload)


FACES = {
    "ddp": Face(_framework("DDP", "torch", "torch.nn.parallel"), "using_ddp", again=True),
    "fsdp": Face(_framework("FSDP2", "torch", "torch.distributed.fsdp"), "using_fsdp"),
    "accelerate": Face(
        _framework("Accelerate", "accelerate", "unipar_accelerate.framework:load"),
        "using_accelerate",
    ),
    "fabric": Face(
        _framework("Lightning Fabric", "lightning-fabric", "lightning_fabric"), "using_fabric"
    ),
    "horovod": Face(
        _framework("Horovod", "horovod", "horovod.torch"),
        "using_horovod",
        "measure.scripts.starting:meeting_point",
        {"UNIPAR_STRATEGY": "horovod"},
    ),
    "deepspeed": Face(
        _framework("DeepSpeed", "deepspeed", "unipar_deepspeed.framework:load"),
        "using_deepspeed",
        "measure.scripts.starting:without_kernel",
    ),
    "colossalai": Face(
        _framework(
            "Colossal-AI", "colossalai", "unipar_colossalai.framework:load", ".venv-colossalai"
        ),
        "using_colossalai",
    ),
}
"""By the page of docs/migrate that tells of each."""

CELLS = (
    {"program": "gpt", "ranks": 1, "turns": 5, "steps": 2},
    {"program": "tiny", "ranks": 1, "turns": 5, "steps": 40},
    {"program": "gpt", "ranks": 2, "turns": 9, "steps": 2},
    {"program": "tiny", "ranks": 2, "turns": 5, "steps": 40},
)
PROGRAMS = {"gpt": "small GPT", "tiny": "tiny MLP"}
ROUNDS, SECONDS = 9, 140.0
CLOCK, PROCESSOR = 0, 1
"""Where what a step takes stands in an answer, see ``two_sides.Step``."""


def measure(face: Face, *, quick: bool) -> tuple[str, list[Row]]:
    """The framework's version, and a row for each program and number of ranks."""
    cells = [{**one, "turns": 2, "steps": 2} for one in CELLS] if quick else CELLS
    found = face.framework.ask(
        "measure.speed.two_sides",
        {
            "script": face.script,
            "package": face.framework.package,
            "preload": face.framework.preload,
            "around": face.around,
            "settings": dict(face.settings),
            "again": face.again,
            "cells": cells,
            "rounds": 1 if quick else ROUNDS,
            "seconds": SECONDS,
        },
    )
    rows = []
    for cell, sides in zip(cells, found["cells"], strict=True):
        ranks = cell["ranks"]
        on = f"{PROGRAMS[cell['program']]}, {ranks} process{'es' * (ranks > 1)}"
        # By the clock only where ranks may wait for each other: other programs interrupt.
        clocks = {"": PROCESSOR} if ranks == 1 else {"": CLOCK, ", processor's time": PROCESSOR}
        for told, clock in clocks.items():
            seconds = {side: [step[clock] for step in steps] for side, steps in sides.items()}
            beside = seconds.pop(BASELINE)
            for side, ours in seconds.items():
                aim = AIM if cell["program"] == "gpt" and side == "the face" else None
                rows.append(Row.timed(f"{on}{told}: {side}", ours, beside, milliseconds, aim))
    return found["version"], rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few turns; figures mean nothing")
    parser.add_argument("--only", nargs="+", choices=FACES, help="some faces; nothing is written")
    parser.add_argument("--json", type=Path, help="write the figures to this file instead")
    args = parser.parse_args()

    began, before = time.perf_counter(), usage()
    measured: dict[str, Any] = {}
    failed: list[str] = []
    for page in args.only or FACES:
        face = FACES[page]
        print(f"measuring {face.framework.name} …", file=sys.stderr, flush=True)
        try:
            number, rows = measure(face, quick=args.quick)
        except SystemExit as failure:
            # The others are measured all the same.
            print(failure, file=sys.stderr, flush=True)
            failed.append(page)
            continue
        print(table(rows), flush=True)
        measured[page] = {
            "framework": f"{face.framework.package} {number}",
            "rows": [asdict(row) | {"ratio": row.ratio.model_dump()} for row in rows],
        }
    about = circumstances("make bench-faces", time.perf_counter() - began, ())
    others = of_others([usage().since(before)])
    figures = {"about": about, "others": others, "faces": measured}
    file = args.json or (None if args.quick or args.only else FIGURES)
    if file is not None:
        file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if failed:
        sys.exit(f"Not measured: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
