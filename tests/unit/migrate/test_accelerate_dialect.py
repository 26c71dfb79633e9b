"""Migrating an Accelerate script changes its imports, and says what its face refuses."""

from __future__ import annotations

import pytest
from telling import told

from unipar.migrate import Migration, migrate_source

SCRIPT = """\
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader

accelerator = Accelerator(gradient_accumulation_steps=4)
loader = DataLoader(list(range(9)), batch_size=2)
model = nn.Linear(1, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
model, opt, loader = accelerator.prepare(model, opt, loader)
for x in loader:
    with accelerator.accumulate(model):
        loss = model(x).sum()
        accelerator.backward(loss)
        opt.step()
        opt.zero_grad()
"""


def migrated(*changes: tuple[str, str], settings: dict[str, str] | None = None) -> Migration:
    text = SCRIPT
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return migrate_source(text, file="train.py", settings=settings)


def refused(*changes: tuple[str, str], settings: dict[str, str] | None = None) -> str:
    migration = migrated(*changes, settings=settings)
    assert migration.refused
    assert not migration.changed
    return told(migration, "refused")


def test_imports_change_and_nothing_else() -> None:
    migration = migrated()
    assert not migration.notes
    assert migration.config == {}
    changed = SCRIPT.replace("from accelerate", "from unipar.compat.accelerate")
    assert migration.code == changed


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import accelerate", "import unipar.compat.accelerate as accelerate"),
        ("import accelerate as acc", "import unipar.compat.accelerate as acc"),
        ("import accelerate.utils as u", "import unipar.compat.accelerate.utils as u"),
        ("from accelerate import logging", "from unipar.compat.accelerate import logging"),
        ("from accelerate.utils.memory import find_executable_batch_size",
         "from unipar.compat.accelerate.utils import find_executable_batch_size"),
    ],
)  # fmt: skip
def test_every_form_of_import(before: str, after: str) -> None:
    migration = migrated(("from torch import nn", f"from torch import nn\n{before}"))
    assert f"from torch import nn\n{after}\n" in migration.code


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([("import set_seed", "import set_seed, DummyOptim")],
         "train.py:3: refused: DummyOptim: the face has no DummyOptim. Build the optimizer"),
        ([("import Accelerator", "import Accelerator, init_empty_weights")],
         "the face has no init_empty_weights. It spreads a model for inference"),
        ([("import set_seed", "import set_seed\nimport accelerate.state")],
         "import accelerate.state binds the name accelerate."),
        ([("import set_seed", "import set_seed\nfrom accelerate.hooks import ModelHook")],
         "the face has no accelerate.hooks."),
        ([("        opt.step", "        accelerator.lomo_backward(loss, 1e-3)\n"
           "        opt.step")],
         "the face refuses lomo_backward. Its optimizer steps within"),
    ],
)  # fmt: skip
def test_what_the_face_refuses_is_said_beforehand(
    changes: list[tuple[str, str]], said: str
) -> None:
    assert said in refused(*changes)


@pytest.mark.parametrize(
    "line",
    ["from accelerate.test_utils import mocked", "from accelerate import init_empty_weights",
     "accelerator.lomo_backward(loss, 1e-3)"],
)  # fmt: skip
@pytest.mark.parametrize("branch", ["if sys.argv[1:]:", "if not sys.argv[1:]:\n    pass\nelse:"])
def test_what_a_run_may_not_come_to_keeps_no_script_from_being_migrated(
    line: str, branch: str
) -> None:
    around = f"import sys\n{branch}\n    {line}\n"
    migration = migrated(("loader = DataLoader", f"{around}loader = DataLoader"))
    assert not migration.refused
    assert "accelerate import Accelerator" in migration.code
    (note,) = (one for one in migration.notes if "comes to this line" in one.why)
    assert note.kind == "changed"
    assert "from accelerate" not in migration.code


def test_how_a_file_is_started_decides_nothing() -> None:
    line = 'if __name__ == "__main__":\n    from accelerate.hooks import ModelHook\n'
    assert "the face has no accelerate.hooks." in refused(
        ("from torch import nn\n", f"from torch import nn\n{line}")
    )


def test_a_trigger_is_the_same_on_all_ranks() -> None:
    saved = (
        "        opt.step()\n        if loss < 1:\n            accelerator.set_trigger()\n"
        "        if accelerator.check_trigger():\n            accelerator.save_state('out')\n"
    )
    migration = migrated(("        opt.step()\n", saved))
    assert migration.changed
    assert not migration.notes


def test_the_file_of_accelerate_config_becomes_settings() -> None:
    file = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nmixed_precision: bf16\n"
        "deepspeed_config:\n  zero_stage: 3\n  offload_optimizer_device: none\n"
        "num_processes: 2\nuse_cpu: false\n"
    )
    migration = migrated(settings={"default_config.yaml": file, "other.yaml": "a: [1"})
    assert migration.config == {"strategy": "zero3", "precision": "bf16"}
    fsdp = file.replace("DEEPSPEED", "FSDP") + (
        "fsdp_config:\n  fsdp_reshard_after_forward: false\n  fsdp_offload_params: true\n"
    )
    strategy = {"name": "fsdp", "cpu_offload": True, "sharding": "grad_op"}
    assert migrated(settings={"c.yaml": fsdp}).config["strategy"] == strategy
    said = refused(
        settings={"c.yaml": file.replace("  zero_stage", "  gradient_clipping: 1\n  zero_stage")}
    )
    assert "c.yaml sets gradient_clipping, which belongs into the script." in said
    said = refused(settings={"c.yaml": file.replace("DEEPSPEED", "TP")})
    assert "c.yaml asks for distributed_type TP. Use one of NO, MULTI_GPU" in said
