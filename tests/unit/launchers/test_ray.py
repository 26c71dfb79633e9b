"""What the launcher ``ray`` refuses before it looks at Ray; the rest is in tests/cluster."""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from unipar.callbacks import RunInfo, StepRecord
from unipar.errors import ConfigError
from unipar.launchers import ray, resolve
from unipar.launchers.ray import RayLauncher, RayOptions


def installed(monkeypatch: pytest.MonkeyPatch, version: str | None, *missing: str) -> None:
    """Pretend that this version of Ray is installed, and these packages are not."""

    def found(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", found)
    monkeypatch.setattr(ray, "find_spec", lambda name: None if name in missing else object())


@pytest.mark.parametrize(
    ("version", "missing", "message"),
    [
        (None, (), "the package 'ray' is not installed. Run: pip install \"unipar[ray]\""),
        ("3.0.1", (), "ray 3.0.1 is installed, and 2.60 or a later 2.x is needed. Run: pip"),
        ("2.9.3", (), "ray 2.9.3 is installed, and 2.60 or a later 2.x is needed. Run: pip"),
        ("2.60.0", ("pyarrow",), "Ray Train needs pyarrow, not installed. Run: pip"),
    ],
)
def test_what_is_not_installed_is_named_with_the_command(
    version: str | None, missing: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, version, *missing)
    with pytest.raises(ConfigError) as error:
        resolve(RayOptions()).resolve_devices("cpu", 1, 1)
    assert str(error.value).startswith("launcher 'ray' cannot be used here: ")
    assert message in str(error.value)


def test_asking_for_the_launcher_imports_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "2.60.0")
    assert isinstance(resolve(RayOptions()), RayLauncher)
    assert "ray" not in sys.modules


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpus": 0}, "cpus: 0 was given. Allowed: a whole number above 0"),
        ({"addres": "auto"}, "unknown key 'addres'. Did you mean 'address'?"),
    ],
)
def test_wrong_option_is_refused(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, "2.60.0")
    with pytest.raises(ConfigError) as error:
        resolve({"name": "ray", **options})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ray://head:10001", "is one of Ray's client, whose driver runs elsewhere"),
        ("head", "is neither 'auto' nor HOST:PORT"),
        ("head:99999", "is neither 'auto' nor HOST:PORT"),
        ("{free}", "no cluster of Ray answers as it should at '127.0.0.1:"),
    ],
)
def test_address_where_no_cluster_can_be_is_refused_at_once(address: str, message: str) -> None:
    with socket.socket() as held:
        # Bound, and nobody listens.
        held.bind(("127.0.0.1", 0))
        address = address.format(free=f"127.0.0.1:{held.getsockname()[1]}")
        with pytest.raises(ConfigError) as error:
            RayLauncher(RayOptions(address=address)).check(1, 2, "cpu")
    assert message in str(error.value)


def test_several_nodes_need_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError) as error:
        RayLauncher().check(2, 2, "cpu")
    assert "has no cluster but this machine" in str(error.value)


@pytest.mark.parametrize(
    ("address", "variable", "elsewhere"),
    [(None, None, False), ("auto", None, True), (None, "head:1", True), ("local", "head:1", False)],
)
def test_only_a_running_cluster_is_elsewhere(
    address: str | None, variable: str | None, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    assert RayLauncher(RayOptions(address=address)).elsewhere is elsewhere


def test_ray_is_told_the_newest_of_all_metrics(tmp_path: Path) -> None:
    (report,) = RayLauncher().callbacks(tmp_path)
    run = RunInfo("ddp", 2, "cpu", 20, None, 8, 10, tmp_path, config={"log_every": 5})
    for step in range(1, 11):
        report.on_step_end(run, StepRecord(step, 0, step / 2, None, 0.1, 8.0, 8, 1.0, 1))
    told = json.loads((tmp_path / "report.json").read_text())
    # Step 10 came within a second.
    assert (told["step"], told["loss"]) == (5, 2.5)
    report.on_checkpoint(run, 10, tmp_path / "step-10")
    report.on_evaluate_end(run, 10, {"accuracy": 0.5})
    told = json.loads((tmp_path / "report.json").read_text())
    assert (told["step"], told["loss"], told["eval/accuracy"]) == (10, 5.0, 0.5)
    assert told["checkpoint"] == str(tmp_path / "step-10")


def test_what_nodes_run_needs_neither_unipar_nor_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(ray.__file__).with_name("ray_node.py")
    spec = importlib.util.spec_from_file_location("alone", path)
    assert spec is not None
    assert spec.loader is not None
    for name in [name for name in sys.modules if name.split(".")[0] in ("unipar", "torch")]:
        monkeypatch.setitem(sys.modules, name, None)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
