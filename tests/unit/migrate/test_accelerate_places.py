"""Scripts that ask an Accelerator for devices which no strategy trains on."""

from __future__ import annotations

import pytest

from unipar.migrate import migrate_source

SCRIPT = """\
import torch
from accelerate import Accelerator, DistributedType

accelerator = Accelerator()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
length = 128 if CONDITION else None
for step in range(12):
    loss = model(torch.randn(4, 2)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("condition", "answer"),
    [
        ("accelerator.distributed_type == DistributedType.XLA", "False"),
        ("accelerator.distributed_type != DistributedType.TPU", "True"),
        ("accelerator.distributed_type in [DistributedType.XLA, DistributedType.HPU]", "False"),
        ("accelerator.distributed_type not in (DistributedType.MULTI_NPU,)", "True"),
    ],
)
def test_the_answer_is_known(condition: str, answer: str) -> None:
    migration = migrate_source(SCRIPT.replace("CONDITION", condition))
    assert f"length = 128 if {answer} else None" in migration.code
    assert "DistributedType" not in migration.code
    assert [note.why for note in migration.notes] == [
        f"this is {answer}: unipar trains on CPUs and NVIDIA's GPUs."
    ]


@pytest.mark.parametrize(
    "condition",
    [
        "accelerator.distributed_type == DistributedType.MULTI_GPU",
        "accelerator.distributed_type in [DistributedType.XLA, DistributedType.NO]",
        "accelerator.distributed_type == other",
    ],
)
def test_what_the_strategy_decides_is_refused(condition: str) -> None:
    migration = migrate_source("other = 1\n" + SCRIPT.replace("CONDITION", condition))
    assert not migration.changed
    assert any(
        "`distributed_type` is Accelerate's own; unipar has no counterpart." in str(note)
        for note in migration.notes
    )
