"""Run what a GPU alone can prove, for the table of the docs.

python measure/gpu/tests.py                 to docs/gpu/tests.json
python measure/gpu/tests.py --output FILE   to another file

Tests marked `gpu`, and the conformance kit on the GPU by one rank, and by two that share it. Exit
code 1 if anything failed, or if there is no GPU; what failed is in the record.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
# Last, so that what is installed is tested.
sys.path.append(str(ROOT))

from measure.gpu import cards  # noqa: E402

OUTPUT = ROOT / "docs" / "gpu" / "tests.json"
MARKED = {
    "tests marked `gpu`": [
        *("-m", "gpu", "backends/torch/tests/test_gpu.py"),
        "tests/integration/fit/test_feed_on_gpus.py",
    ],
    "tests marked `gpu`, of Accelerate": ["-m", "gpu", "backends/accelerate/tests"],
    "scripts before and after": ["-m", "gpu", "tests/migrate/test_scripts_on_gpus.py"],
}
FRAMEWORKS = {"zero3": "DeepSpeed", "zero2": "DeepSpeed", "zero1": "DeepSpeed"} | {
    **dict.fromkeys(("mesh:tp=2", "mesh:pp=2", "mesh:cp=2"), "PyTorch"),
    **dict.fromkeys(("accelerate:plugin=fsdp", "accelerate"), "Accelerate"),
    **dict.fromkeys(("ddp:shard_optimizer=true", "fsdp", "ddp", "dp", "single"), "PyTorch"),
}
"""Strategies; those that take longest come first, so that none is left alone at the end."""
KITS = {f"kit: `{one}`": ["--pyargs", "unipar.testing", "--strategy", one] for one in FRAMEWORKS}
"""What pytest is given; the kit is told the device and the world sizes besides."""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--strategies", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS))
    parser.add_argument("--kit", action="store_true", help="leave out the tests marked `gpu`")
    parser.add_argument("--only", default="", help="a part of the kit's cases, as for pytest -k")
    parser.add_argument("--lanes", type=int, default=max(1, min(8, (os.cpu_count() or 1) // 2)))
    parser.add_argument("--minutes", type=float, default=7.0, help="of all suites together")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--command", default="python measure/gpu/tests.py", help="for the docs")
    args = parser.parse_args(argv)
    if args.device == "cuda":
        cards.require()
    began = time.perf_counter()

    def found(name: str, suite: list[str]) -> dict[str, Any]:
        left = args.minutes * 60 - (time.perf_counter() - began)
        result = run(suite, args.device, args.only, max(left, 1.0))
        print(f"{name}: {told(result)}", flush=True)
        marked = "Accelerate" if "Accelerate" in name else "PyTorch"
        return {"framework": FRAMEWORKS.get(suite[-1], marked), **result}

    chosen = {name: suite for name, suite in KITS.items() if suite[-1] in args.strategies}
    if not args.kit:
        chosen = MARKED | chosen
    with ThreadPoolExecutor(args.lanes) as lanes:
        suites = dict(zip(chosen, lanes.map(found, chosen, chosen.values()), strict=True))
    record = {
        **cards.about(args.device, args.command, time.perf_counter() - began),
        "suites": suites,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{record['gpu']}, driver {record['driver'] or 'unknown'}, torch {record['torch']}")
    print(f"Written: {args.output}")
    return int(any(found["failed"] for found in suites.values()))


def run(suite: list[str], device: str, only: str, seconds: float) -> dict[str, Any]:
    """How many tests passed and were skipped, which failed, and how long it took."""
    kit = ["--device-type", device, "--world-sizes", "1,2"] if "--strategy" in suite else []
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.xml")
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"),
            *(f"--junit-xml={report}", *suite, *kit, *(["-k", only] if only and kit else [])),
        ]
        # Where CI is true, what is skipped would have failed. The path: what is installed is
        # tested, and not what lies in this directory (Python 3.11 on).
        environ = {**os.environ, "CI": "", "PYTHONSAFEPATH": "1"}
        with Path(directory, "log").open("w+") as log:
            try:
                code = subprocess.run(
                    command, cwd=ROOT, env=environ, stdout=log, stderr=log, timeout=seconds
                ).returncode
            except subprocess.TimeoutExpired:
                code = None
            if code != 0:
                log.seek(0)
                print(log.read(), flush=True)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    # A test and its teardown may fail each.
    ends = {f"{case.get('classname')}::{case.get('name')}": "passed" for case in cases}
    for case in cases:
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                ends[f"{case.get('classname')}::{case.get('name')}"] = child.tag
    failed = [test for test, end in ends.items() if end in ("failure", "error")]
    # A report is written when all tests have run.
    if code not in (0, 1) and not (code is None and cases):
        what = f"pytest ended with {code}" if code is not None else f"{seconds:.0f} s were over"
        failed.append(f"the suite as a whole: {what}")
    return {
        "passed": sum(end == "passed" for end in ends.values()),
        "skipped": sum(end == "skipped" for end in ends.values()),
        "failed": failed,
        "seconds": round(time.perf_counter() - began),
    }


def told(found: dict[str, Any]) -> str:
    counts = f"{found['passed']} passed, {found['skipped']} skipped, {len(found['failed'])} failed"
    return f"{counts} in {found['seconds']} s"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
