"""Run what rests on torch with the torch that is installed here, for the table of the docs.

python measure/strategies/torches.py                   all of it, to docs/backends/torches.json
python measure/strategies/torches.py --suites unit     some of it; the record keeps the rest

Exit code 1 if anything failed; the record is written all the same, and names what did.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

# Before torch is imported: threads of its own would compete with the other processes.
os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from importlib.metadata import version  # noqa: E402

from measure.report import circumstances  # noqa: E402

RECORD = ROOT / "docs" / "backends" / "torches.json"
KIT = ["--pyargs", "unipar.testing", "--strategy"]
# What is left out of tests/integration starts the same code as programs, or draws its pages.
INTEGRATION = ("bench", "checkpoint", "fit", "kit", "launch")
FOLDERS = ("unit", *(f"integration/{name}" for name in INTEGRATION))
SUITES = {
    **{name: [f"tests/{name}"] for name in FOLDERS},
    "backends/torch": ["backends/torch"],
    **{strategy: [*KIT, strategy] for strategy in ("single", "ddp", "fsdp")},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--command", default="python measure/strategies/torches.py", help="for the docs"
    )
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=list(SUITES))
    asked = parser.parse_args()
    failed = False
    for name in asked.suites:
        found = run(name)
        write(name, found, asked.command)
        failed |= bool(found["failed"])
    print(f"Written: {RECORD.relative_to(ROOT)}")
    return int(failed)


def write(name: str, found: dict[str, Any], command: str) -> None:
    """Add a suite to what the record says of this torch."""
    records = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    suites = {**records.get(version("torch"), {}).get("suites", {}), name: found}
    records[version("torch")] = {
        "about": circumstances(command, sum(s["seconds"] for s in suites.values()), ("numpy",)),
        "python": platform.python_version(),
        "suites": {name: suites[name] for name in SUITES if name in suites},
    }
    in_order = {torch: records[torch] for torch in sorted(records, key=_numbers)}
    RECORD.write_text(json.dumps(in_order, indent=1) + "\n")


def run(name: str) -> dict[str, Any]:
    """How many tests passed and were skipped, which failed, and how long it took."""
    print(f"==> {name}", flush=True)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.xml")
        command = [sys.executable, "-m", "pytest", "-m", "not thorough", f"--junit-xml={report}"]
        # Where CI is true, what is skipped would have failed.
        environ = {**os.environ, "CI": ""}
        ended = subprocess.run([*command, *SUITES[name]], cwd=ROOT, env=environ)
        # Anything else is an interrupted run, or none.
        if ended.returncode not in (0, 1):
            raise SystemExit(f"{name}: pytest ended with exit code {ended.returncode}")
        cases = list(ElementTree.parse(report).iter("testcase"))
    # A test and its teardown may fail each.
    ends = {f"{case.get('classname')}::{case.get('name')}": "passed" for case in cases}
    for case in cases:
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                ends[f"{case.get('classname')}::{case.get('name')}"] = child.tag
    return {
        "passed": sum(end == "passed" for end in ends.values()),
        "skipped": sum(end == "skipped" for end in ends.values()),
        "failed": [test for test, end in ends.items() if end in ("failure", "error")],
        "seconds": round(time.perf_counter() - began),
    }


def _numbers(torch: str) -> list[int]:
    return [int(number) for number in torch.partition("+")[0].split(".")]


if __name__ == "__main__":
    sys.exit(main())
