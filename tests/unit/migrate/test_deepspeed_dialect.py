"""Migrating a DeepSpeed script changes its imports, and says what its face refuses."""

from __future__ import annotations

import pytest
from telling import told

from unipar.migrate import Migration, migrate_source

SCRIPT = """\
import deepspeed
import torch
from torch import nn

config = {"train_batch_size": 8, "zero_optimization": {"stage": 1 + 1}}
model = nn.Linear(1, 1)
engine, optimizer, _, _ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=config
)
for x in torch.ones(8, 4, 1):
    loss = engine(x).sum()
    engine.backward(loss)
    engine.step()
"""


def migrated(*changes: tuple[str, str]) -> Migration:
    text = SCRIPT
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return migrate_source(text, file="train.py")


def test_imports_change_and_nothing_else() -> None:
    migration = migrated()
    assert not migration.notes
    assert migration.config == {}
    assert migration.launcher == "torchrun"
    changed = "import unipar.compat.deepspeed as deepspeed"
    assert migration.code == SCRIPT.replace("import deepspeed", changed)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import deepspeed as ds", "import unipar.compat.deepspeed as ds"),
        ("import deepspeed.comm as dist", "import unipar.compat.deepspeed.comm as dist"),
        ("from deepspeed import comm as dist", "from unipar.compat.deepspeed import comm as dist"),
        ("from deepspeed.ops.adam.fused_adam import FusedAdam",
         "from unipar.compat.deepspeed.ops.adam import FusedAdam"),
        ("from deepspeed.runtime.lr_schedules import WarmupLR",
         "from unipar.compat.deepspeed.runtime.lr_schedules import WarmupLR"),
        ("from deepspeed.runtime.zero.partition_parameters import GatheredParameters",
         "from unipar.compat.deepspeed.runtime.zero import GatheredParameters"),
        ("from deepspeed.runtime.engine import DeepSpeedEngine",
         "from unipar.compat.deepspeed.runtime import DeepSpeedEngine"),
        ("from deepspeed.accelerator import get_accelerator",
         "from unipar.compat.deepspeed.accelerator import get_accelerator"),
        ("from deepspeed.utils.logging import logger",
         "from unipar.compat.deepspeed.utils import logger"),
    ],
)  # fmt: skip
def test_every_form_of_import(before: str, after: str) -> None:
    migration = migrated(("from torch import nn", f"from torch import nn\n{before}"))
    assert f"from torch import nn\n{after}\n" in migration.code
    exec(after, {})  # The face has it there.


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("from torch", "from deepspeed.pipe import PipelineModule\nfrom torch"),
         "train.py:3: refused: PipelineModule: the face has no PipelineModule. The pipeline"),
        (("from torch", "from deepspeed.moe.layer import MoE\nfrom torch"),
         "the face has no MoE. Experts are layers of the model here"),
        (("from torch", "from deepspeed.ops.lamb import FusedLamb\nfrom torch"),
         "the face has no FusedLamb. It is an optimizer of DeepSpeed's own"),
        (("from torch", "import deepspeed.comm\nfrom torch"),
         "import deepspeed.comm binds the name deepspeed."),
        (("model = nn.Linear(1, 1)", "model = deepspeed.PipelineModule([nn.Linear(1, 1)])"),
         "the face has no PipelineModule."),
        (("    engine.step", "    engine.offload_states()\n    engine.step"),
         "the face refuses offload_states. What lies in host memory"),
        (("    engine.step", "    optimizer.cur_scale, optimizer.loss_scaler\n    engine.step"),
         "optimizer.loss_scaler: the face has no loss_scaler there. Engines scale the losses"),
        (("    engine.step", "    print(engine.optimizer.loss_scaler.cur_scale)\n    engine.step"),
         "engine.optimizer.loss_scaler: the face has no loss_scaler there. Engines scale"),
    ],
)  # fmt: skip
def test_what_the_face_refuses_is_said_beforehand(change: tuple[str, str], said: str) -> None:
    migration = migrated(change)
    assert migration.refused
    assert not migration.changed
    assert said in told(migration, "refused")
