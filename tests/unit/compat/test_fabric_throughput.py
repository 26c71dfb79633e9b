"""What is measured is Fabric's, by name and number."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from unipar.compat.fabric import Fabric
from unipar.compat.fabric.loggers import CSVLogger
from unipar.compat.fabric.utilities import Throughput, ThroughputMonitor

pytestmark = pytest.mark.usefixtures("alone")

MADE: list[dict[str, Any]] = [
    {"window_size": 3},
    {"window_size": 3, "world_size": 4, "available_flops": 1e4},
    {"window_size": 2, "separator": "|"},
]
UPDATES = [
    {"time": 0.5 * n + 0.01 * n * n, "batches": n, "samples": 3 * n, "lengths": 40 * n + n * n,
     "flops": 100 + n}
    for n in range(1, 6)
]  # fmt: skip
PLAIN = [{key: one[key] for key in ("time", "batches", "samples")} for one in UPDATES]
REAL = """
import json, sys
from lightning_fabric.utilities.throughput import Throughput
found = []
for made, updates in json.loads(sys.stdin.read()):
    one = Throughput(**made)
    for update in updates:
        one.update(**update)
        found.append(one.compute())
print(json.dumps(found))
"""


def test_rates_are_fabrics() -> None:
    pytest.importorskip("lightning_fabric")
    cases = [(made, updates) for made in MADE for updates in (UPDATES, PLAIN)]
    done = subprocess.run(
        [sys.executable, "-c", REAL], input=json.dumps(cases), capture_output=True, text=True,
        check=True, timeout=60,
    )  # fmt: skip
    found: list[Any] = []
    for made, updates in cases:
        one = Throughput(**made)
        for update in updates:
            one.update(**update)
            found.append(one.compute())
    expected = json.loads(done.stdout.splitlines()[-1])
    assert [{*one} for one in found] == [{*one} for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-12)


def test_a_monitor_logs_by_step(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    fabric = Fabric(accelerator="cpu", devices=1, loggers=logger)
    monitor = ThroughputMonitor(fabric, window_size=2)
    for update in UPDATES[:3]:
        monitor.update(**update)
        monitor.compute_and_log()
    assert monitor.step == 2
    found = monitor.compute_and_log(step=7)
    assert found == monitor.compute()
    rows = list(csv.DictReader((tmp_path / "lightning_logs/version_0/metrics.csv").open()))
    assert [row["step"] for row in rows] == ["0", "1", "2", "7"]
    assert float(rows[-1]["device/samples_per_sec"]) == found["device/samples_per_sec"]
    monitor.reset()
    monitor.update(time=0.1, batches=1, samples=1)
    assert monitor.compute() == {"time": 0.1, "batches": 1, "samples": 1}


@pytest.mark.parametrize(
    "update",
    [
        {"time": 0.1, "batches": 2, "samples": 2},
        {"time": 2, "batches": 1, "samples": 2},
        {"time": 2, "batches": 3, "samples": 2},
        {"time": 2, "batches": 3, "samples": 4, "lengths": 3},
    ],
)
def test_totals_that_do_not_rise_are_refused(update: Any) -> None:
    one = Throughput()
    one.update(time=1, batches=1, samples=1)
    with pytest.raises(ValueError, match=r"has to rise|can be fewer"):
        one.update(**update)
