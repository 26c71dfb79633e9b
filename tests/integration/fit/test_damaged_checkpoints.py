"""``resume="auto"`` where the newest checkpoint, or each of them, is damaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import build, fit_in_world, make_adamw, make_scheduler, reference

from unipar import RunResult, Session
from unipar.checkpoint import verify
from unipar.checkpoint.manifest import MANIFEST
from unipar.errors import CheckpointError, ConfigError
from unipar.testing.pool import WorldPools
from unipar.world import Placement

Run = Callable[..., RunResult]


def damage(checkpoint: Path, pattern: str) -> Path:
    """Change the last byte of each file that the pattern names; the last of these files."""
    files = sorted(checkpoint.glob(pattern))
    for file in files:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    return files[-1]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


EVERY: dict[str, Any] = {
    "checkpoint": {"every_steps": 1, "keep_last": None},
    "lr_scheduler": make_scheduler,
}


@pytest.mark.parametrize("part", ["*/weights/*", "*/optimizer/*", "rng/*", MANIFEST])
def test_the_newest_that_is_whole_is_taken(
    run: Run, directory: Path, caplog: pytest.LogCaptureFixture, part: str
):
    run(steps=4, **EVERY)
    damaged = damage(directory / "step-00000004", part)
    damage(directory / "step-00000003", "*/optimizer/*")
    result = run(resume="auto", **EVERY)
    assert [record.step for record in result.history] == [3, 4, 5, 6]
    assert result.losses == pytest.approx(reference(scheduler=True)[0][2:], rel=1e-6)
    passed = [record.message for record in caplog.records if "Passing over" in record.message]
    assert len(passed) == 2
    assert "step-00000004" in passed[0]
    assert f"{damaged} is damaged" in passed[0]
    assert "step-00000003" in passed[1]


class Idle(torch.optim.AdamW):
    """Takes none of its first steps, and makes no state in them."""

    def __init__(self, named: Any, idle: int) -> None:
        super().__init__([p for _, p in named], lr=0.02)
        self.idle = idle

    def step(self, closure: Any = None) -> None:
        self.idle -= 1
        if self.idle < 0:
            super().step(closure)


def test_a_moment_that_only_the_damaged_one_has_is_forgotten(run: Run, directory: Path):
    checkpoint = EVERY["checkpoint"]
    whole = run(steps=3, checkpoint=checkpoint, optimizer=partial(Idle, idle=1))
    shutil.rmtree(directory / "step-00000002")
    damage(directory / "step-00000003", "rng/*")
    rest = run(steps=3, checkpoint=checkpoint, optimizer=partial(Idle, idle=0), resume="auto")
    assert rest.losses == pytest.approx(whole.losses[1:])


def test_where_none_is_whole_nothing_begins_anew(run: Run, directory: Path):
    run(steps=2, **EVERY)
    for path in directory.iterdir():
        damage(path, "*/weights/*")
    with pytest.raises(CheckpointError) as caught:
        run(resume="auto", **EVERY)
    message = str(caught.value)
    assert f"None of the 2 checkpoints in {directory} can be read" in message
    for step in (1, 2):
        assert f"step-0000000{step}" in message
    assert "remove them or choose another directory" in message


def test_what_is_passed_over_does_not_count_as_the_newest(run: Run, directory: Path):
    """Else those that the run saves would be removed for it."""
    run(steps=2, checkpoint={"every_steps": 2})
    run(steps=4, checkpoint={"every_steps": 2, "keep_last": None}, resume="auto")
    damage(directory / "step-00000004", "*/weights/*")
    rest = run(steps=3, checkpoint={"keep_last": 1}, resume="auto")
    assert [record.step for record in rest.history] == [3]
    assert kept(directory) == [3, 4]
    # Once it comes to that step, the run puts its own there.
    run(steps=4, checkpoint={"keep_last": 1}, resume="auto")
    assert kept(directory) == [4]
    verify(directory / "step-00000004")


def kept(directory: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in directory.iterdir())


def test_a_path_that_is_named_is_not_replaced(run: Run, directory: Path):
    run(steps=2, **EVERY)
    damaged = damage(directory / "step-00000002", "*/weights/*")
    with pytest.raises(CheckpointError, match=f"{damaged} is damaged"):
        run(resume=directory / "step-00000002", **EVERY)


def test_a_checkpoint_of_another_model_is_not_passed_over(run: Run, directory: Path):
    run(steps=2, **EVERY)
    other = build()
    other.outward = torch.nn.Linear(8, 5)
    with pytest.raises(CheckpointError, match=r"step-00000002[\s\S]*outward"):
        run(other, resume="auto", **EVERY)


def test_a_loop_of_ones_own_loads_the_newest_that_is_whole(run: Run, directory: Path):
    run(steps=3, **EVERY)
    damage(directory / "step-00000003", "*/weights/*")
    with Session("single") as session:
        session.prepare(build(), optimizer=make_adamw)
        assert session.load(directory, optimizer=False) == 2
        with pytest.raises(ConfigError, match="with a learning-rate scheduler"):
            session.load(directory)


def test_ranks_fall_back_together(world_pool: WorldPools, tmp_path: Path):
    """Only the second rank reads the file that is damaged."""

    def task(placement: Placement, changes: dict[str, Any]) -> list[float]:
        return fit_in_world(placement, tmp_path, strategy="fsdp", **EVERY, **changes).losses

    pool = world_pool(2)
    pool.run(task, {"steps": 4})
    damage(tmp_path / "checkpoints" / "step-00000004", "*/optimizer/rank-00001*")
    losses = reference(scheduler=True)[0]
    for found in pool.run(task, {"resume": "auto"}):
        assert found == pytest.approx(losses[3:], rel=1e-5)
