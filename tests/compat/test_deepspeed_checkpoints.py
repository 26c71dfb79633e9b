"""What each rank has in a checkpoint of DeepSpeed's face."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from faces import under
from torch import nn

from unipar.compat import deepspeed
from unipar.compat.run import current
from unipar.errors import CheckpointError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Warned(logging.Handler):
    """Warnings of unipar's."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def kept(directory: Path, stage: int, saves: bool, alike: bool = False) -> tuple[Any, str]:
    """The ``client_state`` that a rank gets back, and what it was warned of."""
    model = nn.Linear(4, 1)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}},
    )
    rank = 5 if alike else current.placement().rank
    if saves:
        state = {"rank": rank, "seen": [torch.full((2,), float(rank)), {"last": rank / 2}]}
        engine.save_checkpoint(directory, client_state=state)
    warned = Warned()
    logging.getLogger("unipar").addHandler(warned)
    try:
        state = engine.load_checkpoint(directory)[1]
    finally:
        logging.getLogger("unipar").removeHandler(warned)
    assert state is not None
    assert state["seen"][0].tolist() == [state["rank"]] * 2
    return state["rank"], " ".join(one for one in warned.said if "client_state" in one)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_each_rank_has_a_state_of_its_own_at_stage_3_alone(
    world_pool: Any, tmp_path: Path, strategy: str
) -> None:
    two = world_pool(2)
    assert two.run(under, strategy, kept, tmp_path / "2", 2, True) == [(0, ""), (0, "")]
    assert two.run(under, strategy, kept, tmp_path / "3", 3, True) == [(0, ""), (1, "")]
    found = world_pool(3).run(under, strategy, kept, tmp_path / "3", 3, False)
    assert [state for state, _ in found] == [0, 1, 0]
    assert "of each of 2 ranks, which differ, and there are 3 now" in found[0][1]
    assert not any(said for _, said in found[1:])


def test_where_ranks_had_the_same_state_another_number_of_them_is_told_of_nothing(
    world_pool: Any, tmp_path: Path
) -> None:
    world_pool(2).run(under, "ddp", kept, tmp_path, 3, True, True)
    assert world_pool(1).run(under, "single", kept, tmp_path, 3, False) == [(5, "")]


def scheduled(directory: Path) -> list[int]:
    """Counts of a schedule that a checkpoint without one is loaded into."""
    model = nn.Linear(4, 1)
    config = {"train_micro_batch_size_per_gpu": 2}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.save_checkpoint(directory)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config
    )
    with pytest.raises(CheckpointError, match=r"without a scheduler.*load_lr_scheduler_states"):
        engine.load_checkpoint(directory)
    engine.load_checkpoint(directory, load_lr_scheduler_states=False)
    return [scheduler.last_epoch, engine.global_steps]


def test_a_schedule_does_not_begin_anew_without_a_word(world_pool: Any, tmp_path: Path) -> None:
    assert world_pool(1).run(under, "single", scheduled, tmp_path) == [[0, 0]]


def written(directory: Path) -> dict[str, torch.dtype]:
    model = nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        config={"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}},
    )
    engine.save_16bit_model(directory)
    file = torch.load(directory / "pytorch_model.bin", weights_only=True)
    return {name: one.dtype for name, one in file.items()}


def test_weights_in_half_precision_come_with_buffers_as_they_are(
    world_pool: Any, tmp_path: Path
) -> None:
    """As DeepSpeed 0.19.8 has them: statistics lose nothing."""
    (found,) = world_pool(1).run(under, "single", written, tmp_path)
    assert found["0.weight"] == found["1.weight"] == torch.bfloat16
    assert found["1.running_mean"] == found["1.running_var"] == torch.float32
