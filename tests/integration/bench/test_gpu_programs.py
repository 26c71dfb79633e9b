"""The programs for a machine with a GPU, as far as a CPU can run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from measure.gpu import bench, cards, environment, tests, wheels
from measure.pages import gpu

ROOT = Path(__file__).resolve().parents[3]
TINY = (
    *("--device", "cpu", "--layers", "1", "--width", "32", "--heads", "2", "--length", "16"),
    *("--batch", "2", "--steps", "1", "--turns", "2", "--warmup", "1", "--backend", "eager"),
)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of the benchmark, at a size that says nothing."""
    output = tmp_path_factory.mktemp("gpu") / "bench.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "measure/gpu/bench.py"), *TINY, "--output", str(output)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "by hand" in done.stdout
    return json.loads(output.read_text())


def test_the_benchmark_trains_the_same_as_its_loops_by_hand(record: dict[str, Any]) -> None:
    assert list(record["groups"]) == ["single", "ddp", "fsdp"]
    for ours, by_hand in record["groups"].values():
        assert ours["loss"] == pytest.approx(by_hand["loss"], rel=1e-3)
        assert by_hand["ratio"]["median"] == 1.0
        assert ours["tokens_per_second"] == pytest.approx(2 * 16 / ours["step_seconds"])
        # Nobody says what a CPU does at most.
        assert ours["share_of_peak"] is None


def test_what_a_card_cannot_do_is_left_out_and_said_to_be(record: dict[str, Any]) -> None:
    assert "precision='fp8' needs a GPU" in record["left_out"]["fp8"]
    assert "Left out: fp8" in gpu.shape(record)


def test_the_page_tells_card_driver_and_torch(record: dict[str, Any]) -> None:
    about = gpu.about({**record, "gpu": "NVIDIA H200", "driver": "580.159.03"})
    assert about.startswith(f"NVIDIA H200, driver 580.159.03, torch {torch.__version__}.")
    heads, rows = gpu.bench(record)
    assert [row[:2] for row in rows[:2]] == [["single", "`single`"], ["single", "by hand"]]
    assert {len(row) for row in rows} == {len(heads)}
    assert rows[0][-1] == "unknown"


def test_a_share_is_of_the_cards_peak_in_that_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    assert cards.peak("cuda", "bf16")[0] == 989.4e12
    assert cards.peak("cuda", "fp8")[0] == 1978.9e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA A100-SXM4-80GB")
    assert cards.peak("cuda", "fp8")[0] is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Another")
    assert cards.peak("cuda", "bf16") == (None, "")


def test_operations_are_those_of_every_product() -> None:
    layers, width, length = 3, 8, 5
    # Forward, per token: two for each weight, and for each layer the products of a query with all
    # keys and of the weights with all values. The backward pass is twice that.
    weights = layers * 12 * width**2
    forward = 2 * weights + layers * 2 * (2 * length * width)
    assert bench.operations_per_token(weights, layers, width, length) == 3 * forward


@pytest.mark.parametrize("program", [bench, tests])
def test_without_a_gpu_programs_say_what_they_need(
    program: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    output = tmp_path / "record.json"
    with pytest.raises(SystemExit, match=r"no GPU here.*CUDA build of torch") as ended:
        program.main(["--output", str(output)])
    assert ended.value.code != 0
    assert not output.exists()


@pytest.mark.parametrize(
    ("there", "says"),
    [(False, "sees no GPU here"), (True, "make wheels-gpu GPU_PYTHON=3.")],
    ids=["no GPU", "no wheels"],
)
def test_an_environment_is_refused_before_it_is_made(
    there: bool,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(sys, "argv", ["environment.py", str(tmp_path / "env"), str(tmp_path)])
    assert environment.main() == 1
    assert says in capsys.readouterr().err
    assert not (tmp_path / "env").exists()


def test_the_wheels_are_pinned_and_leave_torch_alone() -> None:
    # Its extras are followed by what is installed here.
    pytest.importorskip("torchao")
    found = wheels.needed("3.12")
    assert {"pydantic", "pydantic-core", "pytest", "rich", "torchao", "xxhash"} <= set(found)
    assert found["torchao"] == "0.18.0"
    assert {"torch", "numpy", "sympy", "triton", "unipar", "tomli"}.isdisjoint(found)


def test_a_record_of_tests_becomes_a_row_for_each_suite() -> None:
    found = {"passed": 7, "skipped": 1, "failed": ["a::b"], "seconds": 3}
    assert gpu.tests({"suites": {"kit": found}})[1] == [["kit", "7", "1", "1"]]
    assert gpu.failures({"suites": {"kit": found}}) == "Failed: `a::b`."
