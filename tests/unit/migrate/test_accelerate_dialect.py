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


CONFIG = "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\n"


@pytest.mark.parametrize(
    ("argument", "precision", "told_of"),
    [("mixed_precision=None", "bf16", False), ("mixed_precision='fp16'", None, False),
     ("mixed_precision=args.precision", None, True), ("**options", None, True)],
)  # fmt: skip
def test_what_the_script_passes_wins_over_the_file(
    argument: str, precision: str | None, told_of: bool
) -> None:
    migration = migrated(
        ("gradient_accumulation_steps=4", argument), settings={"c.yaml": CONFIG}
    )  # fmt: skip
    assert migration.config.get("precision") == precision
    said = "c.yaml asks for precision bf16"
    assert (said in told(migration, "changed")) is told_of
    assert ("c.yaml is in unipar.yaml now" in told(migration, "changed")) is not told_of


def test_a_plugin_of_the_script_wins_over_the_file() -> None:
    migration = migrated(
        ("gradient_accumulation_steps=4", "fsdp_plugin=plugin"), settings={"c.yaml": CONFIG}
    )
    assert migration.config == {"precision": "bf16"}
    assert "c.yaml asks for options of fsdp" in told(migration, "changed")


def test_of_several_files_of_accelerate_config_none_is_taken() -> None:
    zero = CONFIG.replace("FSDP", "DEEPSPEED")
    migration = migrated(settings={"configs/fsdp.yaml": CONFIG, "configs/zero.yaml": zero})
    assert migration.config == {}
    assert migration.launched == {}
    assert "configs/fsdp.yaml, configs/zero.yaml, of which none" in told(migration, "changed")


def test_the_original_is_started_with_what_the_file_says() -> None:
    settings = (
        "deepspeed_config:\n  zero_stage: 3\n  zero3_init_flag: true\n"
        "  offload_optimizer_device: none\n"
    )
    file = CONFIG.replace("FSDP", "DEEPSPEED") + settings
    assert migrated(settings={"c.yaml": file}).launched == {
        "ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_CPU": "False",
        "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "True",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
    }  # fmt: skip
    file = CONFIG + "fsdp_config:\n  fsdp_transformer_layer_cls_to_wrap: Block\n"
    found = migrated(settings={"c.yaml": file}).launched
    assert found["ACCELERATE_USE_FSDP"] == "true"
    assert found["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "Block"


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
