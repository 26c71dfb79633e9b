"""``shares="auto"``: a slow rank takes less of each batch, in the run of equal shares."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from small_run import Net, data, fit_in_world, reference
from torch.utils.data import IterableDataset

from unipar import Callback, RunInfo, RunResult, StepRecord
from unipar.errors import ConfigError, DataError
from unipar.testing.pool import WorldPools
from unipar.train import shares
from unipar.world import Placement

pytestmark = pytest.mark.slow


class Slow(Net):
    """Waits for each sample: by default on rank 1 three times as long as elsewhere."""

    def __init__(self, rank: int, seconds: tuple[float, ...] = (0.006, 0.018)) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.seconds = seconds[rank]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(len(x) * self.seconds)
        return super().forward(x)


class Stream(IterableDataset):
    def __init__(self, *, again: bool = True) -> None:
        self.samples = None if again else iter(data())

    def __iter__(self) -> Any:
        return iter(data()) if self.samples is None else self.samples


class Slowing(Callback):
    """Makes rank 1 slow after some steps."""

    every_rank = True

    def __init__(self, model: Slow, after: int) -> None:
        self.model, self.after = model, after

    def on_step_end(self, run: RunInfo, record: StepRecord) -> None:
        if record.step == self.after and run.rank == 1:
            self.model.seconds *= 4


def train(
    placement: Placement,
    directory: Path,
    strategy: str,
    seconds: tuple[float, float] = (0.006, 0.018),
    **changes: Any,
) -> RunResult:
    model = Slow(placement.rank, seconds)
    # Two passes of a rank, also with other parts, whatever a pass costs between ranks.
    settings: dict[str, Any] = {"shares": "auto", "micro_batch_size": 3, **changes}
    return fit_in_world(placement, directory, model, strategy=strategy, **settings)


def decisions(directory: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (directory / "events.jsonl").read_text().splitlines())
    return [row for row in rows if row["event"] == "shares"]


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("ddp", marks=pytest.mark.thorough),
        pytest.param(
            "fsdp",
            marks=pytest.mark.skipif(
                torch.__version__ < "2.13", reason="under fsdp no pass is tried with an older torch"
            ),
        ),
    ],
)
def test_a_slow_rank_takes_less_and_the_losses_stay(
    strategy: str, tmp_path: Path, world_pool: WorldPools
) -> None:
    # So long that what ranks exchange under a loaded machine does not hide it.
    result = world_pool(2).run(train, tmp_path, strategy, (0.02, 0.06))[0]
    assert result.history.losses == pytest.approx(reference()[0], rel=1e-5)
    (decision,) = decisions(tmp_path)
    assert decision["step"] == 0
    assert decision["parts"][1] in (1, 2, 3)
    assert decision["factors"][1] > 1.5
    assert decision["seconds"] > 0


def train_changing(placement: Placement, directory: Path) -> RunResult:
    model = Slow(placement.rank, (0.008, 0.008))
    changes: dict[str, Any] = {
        "strategy": "ddp",
        "shares": "auto",
        "micro_batch_size": 3,
        "steps": 50,
        "callbacks": [Slowing(model, 8)],
    }
    # Those of a run would let it train for a hundred times as long as measuring takes.
    with mock.patch.multiple(shares, STEPS=5, EARLY=0.5, SELDOM=1.0):
        return fit_in_world(placement, directory, model, **changes)


def test_speeds_that_change_are_measured_again(tmp_path: Path, world_pool: WorldPools) -> None:
    result = world_pool(2).run(train_changing, tmp_path)[0]
    assert result.history.losses == pytest.approx(reference(50)[0], rel=1e-5)
    before, after = (
        [row["parts"][1] for row in decisions(tmp_path) if (row["step"] > 8) == late]
        for late in (False, True)
    )
    assert before[0] == 4
    assert min(after) < 4


@pytest.mark.thorough
def test_a_run_resumes_with_parts_measured_again(tmp_path: Path, world_pool: WorldPools) -> None:
    run = world_pool(2).run
    run(functools.partial(train, steps=2, checkpoint=True), tmp_path, "ddp")
    result = run(functools.partial(train, checkpoint=True, resume="auto"), tmp_path, "ddp")[0]
    assert result.history.losses == pytest.approx(reference()[0][2:], rel=1e-5)
    assert [row["step"] for row in decisions(tmp_path)] == [0, 2]


def train_stream(placement: Placement, directory: Path, again: bool, **changes: Any) -> list[float]:
    model, stream = Slow(placement.rank), Stream(again=again)
    settings: dict[str, Any] = {"strategy": "ddp", "steps": 9, **changes}
    with mock.patch.multiple(shares, STEPS=4, SELDOM=0.0):
        return fit_in_world(placement, directory, model, stream, **settings).history.losses


def test_a_stream_goes_on_where_it_is(tmp_path: Path, world_pool: WorldPools) -> None:
    run = world_pool(2).run
    equal = run(train_stream, tmp_path / "equal", True)[0]
    auto = run(functools.partial(train_stream, shares="auto"), tmp_path / "auto", True)[0]
    assert auto == pytest.approx(equal, rel=1e-5)
    assert len(decisions(tmp_path / "auto")) > 1


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        (train, ConfigError, "passes in a step.*Raise micro_batch_size"),
        (train_stream, DataError, "same iterator each time"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    asked: Callable[..., Any], error: type, message: str, tmp_path: Path, world_pool: WorldPools
) -> None:
    first: Any = "ddp" if asked is train else False
    changes = {"micro_batch_size": 1} if asked is train else {"shares": "auto"}
    with pytest.raises(error, match=message):
        world_pool(2).run(functools.partial(asked, **changes), tmp_path, first)
