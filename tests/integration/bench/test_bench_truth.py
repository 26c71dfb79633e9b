"""The benchmark finds what is known to be there: a sleep, a leak, a wrong gradient, a hang."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unipar import ConfigError
from unipar.benchmark.api import bench
from unipar.benchmark.result import BenchResult, CellResult

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SLEEP, LEAK = 0.3, 2**20
STEPS, WARMUP = 6, 2
WIDTHS = (16, 64, 32)
DEVICES = 2
# Far more than a trial takes where several suites share two cores, for the hang must be waited for.
TIME_LIMIT = 75.0
LOSS_BYTES = 8 * 13
"""Of the loss, its count, a rank's step, a fingerprint, the squares of both, and seven flags."""


def model() -> nn.Module:
    """Blocks that FSDP takes for units of their own: every shape can be divided by two."""
    first, between, last = WIDTHS
    return nn.Sequential(nn.Linear(first, between), nn.ReLU(), nn.Linear(between, last))


def parameter_bytes() -> int:
    return 4 * sum(p.numel() for p in model().parameters())


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(64, WIDTHS[0], generator=generator),
        torch.randn(64, WIDTHS[-1], generator=generator),
    )


def loss(model: Any, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def run(output: Path, strategies: Iterable[str], **given: Any) -> BenchResult:
    arguments: dict[str, Any] = {
        "devices": [DEVICES],
        "loss": loss,
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
        "global_batch_size": 16,
        "steps": STEPS,
        "warmup": WARMUP,
        "repeats": 1,
        "time_limit": TIME_LIMIT,
        "output_dir": output,
        "command": "the test's command",
    }
    return bench(model, data(), strategies=list(strategies), **{**arguments, **given})


@pytest.fixture(scope="module")
def told() -> list[tuple[str, str]]:
    return []


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench") / "out"


@pytest.fixture(scope="module")
def result(output: Path, odd_strategies: Path, told: list[tuple[str, str]]) -> BenchResult:
    names = ("ddp", "fsdp", "slow", "wrong", "hanging", "dying")
    return run(output, names, show=lambda cell, what: told.append((cell.strategy, what)))


@pytest.fixture(scope="module")
def again(result: BenchResult, output: Path) -> tuple[BenchResult, list[tuple[str, str]]]:
    """One strategy once more, in the same place."""
    told: list[tuple[str, str]] = []
    found = run(
        output, ("ddp",), repeats=2, show=lambda cell, what: told.append((cell.strategy, what))
    )
    return found, told


def cell(result: BenchResult, strategy: str) -> CellResult:
    return next(one for one in result.cells if one.cell.strategy == strategy)


def median(result: BenchResult, strategy: str) -> float:
    found = cell(result, strategy).repeat_seconds
    assert found is not None
    return found.median


def traffic(result: BenchResult, strategy: str) -> dict[str, tuple[int, int]]:
    seen = cell(result, strategy).trials[0].ranks[0].traffic
    assert seen is not None
    return {one.kind: (one.count, one.bytes) for one in seen}


def test_a_sleep_is_found_to_be_as_long_as_it_is(result: BenchResult) -> None:
    longer = median(result, "slow") - median(result, "ddp")
    assert 0.8 * SLEEP < longer < 2 * SLEEP
    assert [one.cell.strategy for one in result.measured][-1] == "slow"


def test_a_leak_is_found_to_be_as_large_as_it_is(result: BenchResult) -> None:
    def other(strategy: str) -> list[int]:
        ranks = [rank for trial in cell(result, strategy).trials for rank in trial.ranks]
        return [rank.memory.other for rank in ranks if rank.memory]

    # What has leaked by the step whose memory is looked at, which follows one for the traffic.
    leaked = (WARMUP + STEPS + 2) * LEAK
    assert len(other("slow")) == DEVICES
    for size in other("slow"):
        assert size - statistics.median(other("ddp")) == pytest.approx(leaked, rel=0.01)


def test_a_wrong_gradient_is_marked_and_right_ones_are_not(result: BenchResult) -> None:
    wrong = cell(result, "wrong").parity
    assert wrong is not None
    assert wrong.drifts
    assert wrong.difference > 100 * wrong.allowed
    for strategy in ("ddp", "fsdp", "slow"):
        right = cell(result, strategy).parity
        assert right is not None
        assert not right.drifts
        assert right.reference == "single"
        assert right.allowed < 1e-4
    assert "wrong" not in result.recommendation.partition(":")[0]


def test_a_hang_ends_at_its_limit_and_the_others_go_on(
    result: BenchResult, told: list[tuple[str, str]]
) -> None:
    hung = cell(result, "hanging")
    assert (hung.status, hung.trials) == ("time limit", [])
    assert hung.reason == "it was ended after 75 s, the time limit of a trial."
    # Before it as after it, whatever the order was.
    assert ("hanging", "time limit") in told
    assert {(name, "done") for name in ("ddp", "fsdp", "slow", "wrong")} <= set(told)
    assert len([one for one in told if one[1] == "done"]) >= 5


def test_a_death_is_a_row_with_its_reason(result: BenchResult) -> None:
    died = cell(result, "dying")
    assert died.status == "failed"
    assert "rank" in died.reason.lower()
    assert "SIGKILL" in died.reason


def test_ddp_reduces_all_gradients_once(result: BenchResult) -> None:
    assert traffic(result, "ddp") == {"all-reduce": (2, parameter_bytes() + LOSS_BYTES)}


def test_fsdp_gathers_all_parameters_twice_and_scatters_gradients_once(
    result: BenchResult,
) -> None:
    seen = traffic(result, "fsdp")
    assert seen["all-gather"][1] == 2 * parameter_bytes()
    assert seen["reduce-scatter"][1] == parameter_bytes()
    assert seen["all-reduce"] == (1, LOSS_BYTES)


def test_communication_is_a_part_of_the_step(result: BenchResult) -> None:
    for strategy in ("ddp", "fsdp", "slow"):
        for rank in cell(result, strategy).trials[0].ranks:
            assert rank.overlap is not None
            assert 0 <= rank.overlap.exposed <= rank.overlap.communication < rank.overlap.step


def test_memory_is_what_the_formulas_say(result: BenchResult) -> None:
    whole = parameter_bytes()
    for strategy, share in (("ddp", 1), ("fsdp", DEVICES)):
        for rank in cell(result, strategy).trials[0].ranks:
            assert rank.memory is not None
            assert rank.memory.parameters == whole // share
            assert rank.memory.gradients == whole // share
            assert rank.memory.optimizer == whole // share
            assert rank.memory.activations is not None
            assert rank.memory.activations > 0
            assert rank.memory.peak > rank.memory.tensors


def test_operations_and_threads_are_as_they_must_be(result: BenchResult) -> None:
    first, between, last = WIDTHS
    # A product forward, and one backward for weights and inputs each, but for the first inputs.
    per_sample = 2 * (2 * first * between + 3 * between * last)
    assert result.job.flops == 16 * per_sample
    assert result.job.parameters == parameter_bytes() // 4
    threads = {rank.threads for one in result.measured for t in one.trials for rank in t.ranks}
    assert len(threads) == 1
    (link,) = result.interconnect
    assert link.devices == DEVICES
    assert link.matmul_flops["fp32"] > 0
    assert link.beta > 0


def test_the_page_and_the_file_are_there(result: BenchResult, output: Path) -> None:
    assert BenchResult.load(output) == result
    assert "<html" in (output / "report.html").read_text()[:500]


def test_what_is_finished_is_not_run_again(
    result: BenchResult, again: tuple[BenchResult, list[tuple[str, str]]]
) -> None:
    found, told = again
    assert told.count(("ddp", "done before")) == told.count(("ddp", "done")) == 1
    assert cell(found, "ddp").trials[0] == cell(result, "ddp").trials[0]
    assert [trial.repeat for trial in cell(found, "ddp").trials] == [0, 1]


def test_another_job_does_not_go_on_in_the_same_directory(
    result: BenchResult, output: Path
) -> None:
    with pytest.raises(ConfigError, match="holds the results of another job") as error:
        run(output, ("ddp",), global_batch_size=32)
    assert "global_batch_size: 16 there, 32 now" in str(error.value)
