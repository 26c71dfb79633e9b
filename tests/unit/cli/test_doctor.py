"""What doctor reports of limits that this machine does not have."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from unipar.cli.doctor import _print_tables
from unipar.install import doctor
from unipar.strategy import Availability, Capabilities
from unipar.strategy.registry import StrategyInfo

GIB = 1 << 30


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(doctor, "_CGROUP", tmp_path)
    return tmp_path


def test_a_containers_limits_are_seen(cgroup: Path) -> None:
    (cgroup / "cpu.max").write_text("150000 100000\n")
    (cgroup / "memory.max").write_text(f"{2 * GIB}\n")
    host = doctor.examine().host
    assert (host.cores_limit, host.memory_limit) == (1.5, 2 * GIB)
    assert host.usable_cores == min(1.5, host.cores_allowed)


def test_the_older_layout_of_limits_is_seen_too(cgroup: Path) -> None:
    (cgroup / "cpu").mkdir()
    (cgroup / "cpu/cpu.cfs_quota_us").write_text("50000")
    (cgroup / "cpu/cpu.cfs_period_us").write_text("100000")
    (cgroup / "memory").mkdir()
    (cgroup / "memory/memory.limit_in_bytes").write_text("9223372036854771712")
    host = doctor.examine().host
    assert (host.cores_limit, host.memory_limit) == (0.5, None)


def test_no_limit_is_none(cgroup: Path) -> None:
    (cgroup / "cpu.max").write_text("max 100000\n")
    (cgroup / "memory.max").write_text("max\n")
    host = doctor.examine().host
    assert (host.cores_limit, host.memory_limit) == (None, None)
    assert host.usable_cores == host.cores_allowed


def test_a_strategy_that_cannot_run_is_shown_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = Capabilities(frozenset({"fp32"}), frozenset({"cpu"}))
    tpu = Capabilities(frozenset({"bf16"}), frozenset({"tpu"}))
    table = [
        StrategyInfo("here", "one 1.0", Availability(True), cpu),
        StrategyInfo("absent", "two 2.0", Availability(False, "no two.", "pip install two"), None),
        StrategyInfo("elsewhere", "three 3.0", Availability(True), tpu),
    ]
    monkeypatch.setattr(doctor.registry, "table", lambda: table)
    report = doctor.examine()
    shown = io.StringIO()
    _print_tables(report, Console(file=shown, width=200))
    text = shown.getvalue()
    assert "absent cannot run here: no two.\n    to fix it: pip install two" in text
    assert "elsewhere cannot run here: runs on tpu, and there is none here." in text
    assert "here cannot run" not in text.replace("elsewhere cannot run", "")
    assert "\x1b" not in text
    assert json.loads(json.dumps(report.as_dict()))["strategies"][0]["ok"] is True


def test_gpus_are_listed_with_their_peers() -> None:
    devices = tuple(
        doctor.Device(index, "GPU X", 80 * GIB, 79 * GIB, True, (1 - index,)) for index in range(2)
    )
    seen = doctor.examine()
    report = doctor.Report(seen.software, devices, seen.interfaces, seen.host, seen.strategies)
    shown = io.StringIO()
    _print_tables(report, Console(file=shown, width=200))
    assert "GPU X, 80 GiB, 79 GiB free, bf16" in shown.getvalue()
    assert "peer to peer with cuda:1" in shown.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80])
def test_no_word_is_broken_in_a_narrow_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    able = Capabilities(
        frozenset({"fp32", "fp16", "bf16"}), frozenset({"cpu"}), sharded=frozenset({"parameters"})
    )
    info = StrategyInfo("accelerate", "unipar-accelerate 0.1.0", Availability(True), able)
    monkeypatch.setattr(doctor.registry, "table", lambda: [info])
    shown = io.StringIO()
    _print_tables(doctor.examine(), Console(file=shown, width=width))
    text = shown.getvalue()
    assert max(map(len, text.splitlines())) <= width
    words = text.partition("Strategies")[2].split()
    assert "accelerate" in words
    whole = text.partition("There is no room here for")[2]
    assert "unipar-accelerate" in words or "from" in whole
    assert "parameters" in words or "shards" in whole
