"""Run what rests on torch with the torch that is installed here, for the table of the docs.

python measure/strategies/torches.py                   all of it, to docs/backends/torches.json
python measure/strategies/torches.py --suites unit     some of it; the record keeps the rest
python measure/strategies/torches.py --failed          tests that have failed, of which the record
                                                       then says how they ended now

Exit code 1 if anything failed, which the record names, or if a suite was stopped on its way, of
which the record stays as it was.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    **{strategy: [*KIT, strategy] for strategy in ("single", "ddp", "fsdp", "mesh:tp=2")},
}


class Incomplete(Exception):
    """A suite was stopped on its way."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--command", default="python measure/strategies/torches.py", help="for the docs"
    )
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=list(SUITES))
    parser.add_argument("--failed", action="store_true", help="only tests that have failed")
    asked = parser.parse_args()
    failed = False
    for name in asked.suites:
        before = recorded().get(name)
        if asked.failed and not (before and before["failed"]):
            continue
        try:
            found = run_again(name, before) if asked.failed and before else run(name)
        except Incomplete as stopped:
            print(stopped, file=sys.stderr, flush=True)
            failed = True
            continue
        write(name, found, asked.command)
        failed |= bool(found["failed"])
    print(f"Written: {RECORD.relative_to(ROOT)}")
    return int(failed)


def recorded() -> dict[str, dict[str, Any]]:
    """Return what the record says of this torch, by suite."""
    records = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return records.get(version("torch"), {}).get("suites", {})


def write(name: str, found: dict[str, Any], command: str) -> None:
    """Add a suite to what the record says of this torch."""
    records = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    suites = {**recorded(), name: found}
    records[version("torch")] = {
        "about": circumstances(command, sum(s["seconds"] for s in suites.values()), ("numpy",)),
        "python": platform.python_version(),
        "suites": {name: suites[name] for name in SUITES if name in suites},
    }
    in_order = {torch: records[torch] for torch in sorted(records, key=_numbers)}
    RECORD.write_text(json.dumps(in_order, indent=1) + "\n")


def run_again(name: str, before: dict[str, Any]) -> dict[str, Any]:
    """Run the tests of a suite that have failed.

    Args:
        name: of the suite.
        before: its record, with the names of these tests.

    Returns:
        The record with their new ends in place of the old ones.

    Raises:
        Incomplete: as :func:`run` does, or a test is no longer there.
    """
    now = run(name, only=before["failed"])
    sums = {key: before[key] + now[key] for key in ("passed", "skipped", "seconds")}
    return {**now, **sums}


def run(name: str, only: Sequence[str] = ()) -> dict[str, Any]:
    """Run a suite.

    Args:
        name: of the suite.
        only: names of its tests, to run no others.

    Returns:
        How many tests passed and were skipped, which failed, and how long it took.

    Raises:
        Incomplete: some were not run to their end, so that nothing can be said of all.
    """
    print(f"==> {name}", flush=True)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "tally.json")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "not thorough",
            "-p",
            "measure.strategies.tally",
        ]
        # Where CI is true, what is skipped would have failed.
        environ = {**os.environ, "CI": "", "TALLY": str(path)}
        environ["TALLY_ONLY"] = json.dumps(list(only))
        code = subprocess.run([*command, *SUITES[name]], cwd=ROOT, env=environ).returncode
        tally = json.loads(path.read_text()) if path.exists() else {"tests": 0, "ended": {}}
    ends = tally["ended"]
    # 0 and 1 say whether a test failed; any other, that pytest was stopped or had nothing to run.
    expected = len(only) or tally["tests"]
    if code not in (0, 1) or not ends or len(ends) != expected:
        counted = f"{len(ends)} of {expected} tests were run"
        raise Incomplete(f"{name}: not recorded; pytest ended with status {code}, and {counted}")
    outcomes = list(ends.values())
    return {
        "passed": outcomes.count("passed"),
        "skipped": outcomes.count("skipped"),
        "failed": [test for test, outcome in ends.items() if outcome == "failed"],
        "seconds": round(time.perf_counter() - began),
    }


def _numbers(torch: str) -> list[int]:
    return [int(number) for number in torch.partition("+")[0].split(".")]


if __name__ == "__main__":
    sys.exit(main())
