"""Measure unipar beside what one would write without it, all in one run, in turns.

python measure/speed/run.py            everything, and the table goes to docs/benchmarks.md
python measure/speed/run.py --quick    a few turns of each, to see that it runs
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

# Before torch is imported: threads of its own would compete with the other processes.
os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from measure.report import circumstances, table, write_json, write_markdown  # noqa: E402
from measure.speed import (  # noqa: E402
    axes,
    checkpoints,
    imports,
    loading,
    memory,
    migrate,
    overhead,
    replicas,
    startup,
)

PARTS = {
    "overhead": overhead.measure,
    "loading": loading.measure,
    "replicas": replicas.measure,
    "axes": axes.measure,
    "memory": memory.measure,
    "checkpoints": checkpoints.measure,
    "imports": imports.measure,
    "startup": startup.measure,
    "migrate": migrate.measure,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few turns; figures mean nothing")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="some parts; nothing is written")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()

    began = time.perf_counter()
    rows = []
    for name in args.only or PARTS:
        print(f"measuring {name} …", file=sys.stderr, flush=True)
        measured = PARTS[name](quick=args.quick)
        print(table(measured), file=sys.stderr, flush=True)
        rows += measured
    compared = ("lightning-fabric", "accelerate", "numpy", "libcst")
    about = circumstances("make bench", time.perf_counter() - began, compared)
    text = f"{about}\n\n{table(rows)}"
    print(text)
    if args.json:
        write_json(args.json, rows, about)
    if not args.quick and not args.only:
        write_markdown(ROOT / "docs" / "benchmarks.md", text)


if __name__ == "__main__":
    main()
