"""Measure every framework's strategies, for the tables of the docs.

python measure/strategies/tables.py    to docs/backends/survey.json and layouts.json; a few minutes
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

# Before torch is imported: threads of its own would compete with the other processes.
os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from measure.frameworks import FRAMEWORKS  # noqa: E402
from measure.report import circumstances  # noqa: E402
from measure.strategies import layouts  # noqa: E402


def main() -> None:
    began = time.perf_counter()
    found = {}
    for framework in FRAMEWORKS:
        question = {
            "strategies": (*framework.strategies, *framework.half_only),
            "axes": framework.axes,
            "package": framework.package,
        }
        found[framework.name] = framework.ask("measure.strategies.parity", question)
    record = {
        "about": circumstances("make tables", time.perf_counter() - began, ()),
        "frameworks": found,
    }
    path = ROOT / "docs" / "backends" / "survey.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"Written: {path.relative_to(ROOT)}")
    layouts.main()


if __name__ == "__main__":
    main()
