"""Imports of Colossal-AI become its face's; what the face has not is said with line and remedy."""

from __future__ import annotations

import pytest
from telling import told

from unipar.migrate import Migration, migrate_source

SCRIPT = """\
import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin.gemini_plugin import GeminiPlugin
{imported}
from torch import nn, optim

colossalai.launch_from_torch()
booster = Booster(plugin=GeminiPlugin())
model = nn.Linear(1, 1)
opt = optim.SGD(model.parameters(), lr=0.1)
model, opt, *_ = booster.boost(model, opt)
{called}
"""


def migrated(imported: str = "", called: str = "") -> Migration:
    return migrate_source(SCRIPT.format(imported=imported, called=called), file="train.py")


def test_imports_change_and_nothing_else() -> None:
    migration = migrated("from colossalai.nn.lr_scheduler.cosine import CosineAnnealingLR")
    assert not migration.notes
    assert not migration.config
    before = SCRIPT.format(
        imported="from colossalai.nn.lr_scheduler.cosine import CosineAnnealingLR", called=""
    )
    changed = [
        new
        for old, new in zip(before.splitlines(), migration.code.splitlines(), strict=True)
        if old != new
    ]
    assert changed == [
        "import unipar.compat.colossalai as colossalai",
        "from unipar.compat.colossalai.booster import Booster",
        "from unipar.compat.colossalai.booster.plugin import GeminiPlugin",
        "from unipar.compat.colossalai.nn.lr_scheduler import CosineAnnealingLR",
    ]


@pytest.mark.parametrize(
    ("imported", "called", "said"),
    [
        ("from colossalai.zero import GeminiDDP", "", "train.py:4: refused: "),
        ("from colossalai.nn.optimizer import Lamb", "", "Strategies take any class of torch.opti"),
        ("from colossalai.cluster import ProcessGroupMesh", "", "Name the axes of the strategy"),
        ("import colossalai.utils", "", "binds the name colossalai"),
        ("", "model = booster.enable_lora(model)", "peft.get_peft_model"),
    ],
)
def test_what_the_face_has_not_is_refused_with_a_remedy(
    imported: str, called: str, said: str
) -> None:
    migration = migrated(imported, called)
    assert migration.refused
    assert not migration.changed
    assert said in told(migration, "refused")
