"""What is refused and called out of scripts for Colossal-AI, which need not be installed here."""

from __future__ import annotations

import pytest
import torch
from telling import told

from unipar.errors import ConfigError
from unipar.migrate import Migration, migrate_source
from unipar.migrated import boosted

SCRIPT = """\
import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.nn.optimizer import HybridAdam
from torch import nn

colossalai.launch_from_torch()
plugin = LowLevelZeroPlugin(stage=2, precision="fp32")
booster = Booster(plugin=plugin)
model = nn.Linear(1, 1)
opt = HybridAdam(model.parameters(), lr=0.1)
loader = plugin.prepare_dataloader(data, batch_size=2)
model, opt, _, loader, _ = booster.boost(model, opt, dataloader=loader)
for x in loader:
    loss = model(x).sum()
    booster.backward(loss, opt)
    opt.step()
    opt.zero_grad()
"""


def migrated(*changes: tuple[str, str]) -> Migration:
    text = SCRIPT
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return migrate_source(text, file="train.py")


def refused(*changes: tuple[str, str]) -> str:
    migration = migrated(*changes)
    assert migration.refused
    assert not migration.changed
    return told(migration, "refused")


def test_nothing_of_colossalai_is_left() -> None:
    migration = migrated()
    assert not migration.refused
    assert "colossalai" not in migration.code
    assert "booster" not in migration.code
    assert migration.config == {"strategy": {"name": "colossalai", "plugin": "zero2"}}
    (note,) = migration.notes
    assert str(note).startswith(
        "train.py:9: changed: Booster(plugin=plugin): unipar runs Colossal-AI on CPUs only."
    )


def test_its_adam_becomes_torchs_with_its_own_default() -> None:
    code = migrated().code
    assert "torch.optim.AdamW([p for _, p in named], lr=0.1, weight_decay=0.0)" in code
    assert "import torch\n" in code
    code = migrated(("lr=0.1", "lr=0.1, weight_decay=0.2, adamw_mode=False")).code
    assert "torch.optim.Adam([p for _, p in named], lr=0.1, weight_decay=0.2)" in code


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([("booster.backward(loss, opt)",
           "booster.execute_pipeline(iter(loader), model, None, opt)")],
         "train.py:16: refused: booster.execute_pipeline: a pipeline's schedule takes whole steps"),
        ([("plugin = Low", "if ddp:\n    plugin = TorchDDPPlugin()\nelse:\n    plugin = Low")],
         "a run has one Booster with one plugin, and it cannot be seen which this is."),
        ([("plugin = Low", "if ddp:\n    plugin = Low")],
         "which plugin there is, is decided while it runs. Build one, unconditionally."),
        ([("stage=2,", "stage=2, cpu_offload=True,")],
         "unipar.yaml cannot say `cpu_offload=True`"),
        ([('precision="fp32"', "precision=args.precision")],
         "its precision cannot be seen. Write fp32, bf16 or fp16."),
        ([('precision="fp32"', 'precision="fp32", max_norm=args.clip')],
         "the norm is to be known where the optimizer is built. Write a number."),
        ([("plugin=plugin", "")], "a Booster without a plugin trains each rank by itself."),
        ([("model, opt, _, loader, _ = booster", "boosted = booster")],
         "what it gives back is not taken apart here."),
        ([("lr=0.1", "lr=0.1, bias_correction=False")],
         "torch.optim.AdamW has no counterpart of `bias_correction=False`."),
        ([("colossalai.launch_from_torch()", "colossalai.launch(0, 2, 'a', 1)")],
         "train.py:7: refused: colossalai.launch: this is Colossal-AI's own"),
        ([("model = nn.Linear(1, 1)",
           "from colossalai.lazy import LazyInitContext\n"
           "with LazyInitContext():\n    model = nn.Linear(1, 1)")],
         "this is Colossal-AI's own; unipar has no counterpart. Use torch's, or leave it out."),
        ([("    opt.step()", "    booster.enable_lora(model)\n    opt.step()")],
         "`enable_lora` of a Booster has no counterpart."),
    ],
)  # fmt: skip
def test_what_is_refused(changes: list[tuple[str, str]], said: str) -> None:
    assert said in refused(*changes)


def test_what_has_a_reason_of_its_own_is_refused_once() -> None:
    said = refused(
        ("plugin = Low", "if ddp:\n    plugin = TorchDDPPlugin()\nelse:\n    plugin = Low")
    )
    assert said.count("refused") == 1


def test_a_script_without_a_booster_is_refused() -> None:
    migration = migrate_source("import colossalai\ncolossalai.initialize(model)\n", file="t.py")
    assert "t.py:1: refused: import colossalai: no Booster is seen to be built." in str(
        migration.notes[0]
    )


def test_half_precision_is_called_out_and_fp16_is_the_default() -> None:
    migration = migrated((', precision="fp32"', ""))
    assert migration.config["precision"] == "fp16"
    assert "# unipar: weights and gradients were rounded to fp16" in migration.code
    (note,) = [one for one in migration.notes if one.kind == "training"]
    assert note.line == 8
    assert note.why.startswith("weights and gradients were rounded to fp16")


def test_the_scale_of_losses_matters_under_fp16_alone() -> None:
    scaled = ("stage=2,", "stage=2, initial_scale=2**5,")
    assert not [one for one in migrated(scaled).notes if one.kind == "training"]
    half = migrated(scaled, ('precision="fp32"', 'precision="fp16"'))
    assert "the loss scale begins at 65536" in told(half, "training")


def test_an_argument_that_is_none_says_nothing() -> None:
    assert not migrated(("stage=2,", "stage=2, communication_dtype=None,")).refused


def test_annotations_say_what_is_there_now() -> None:
    migration = migrated(
        ("for x in loader", "def save(booster: Booster, plugin: TorchDDPPlugin, model) -> Booster:"
         "\n    booster.save_model(model, 'm.pt')\nsave(booster, plugin, model)\nfor x in loader"),
    )  # fmt: skip
    assert not migration.refused
    assert "def save(booster: None, plugin: None, model) -> None:\n" in migration.code
    assert "colossalai" not in migration.code


def test_a_booster_that_a_function_gives_back_is_nothing() -> None:
    migration = migrated(
        ("booster = Booster(plugin=plugin)",
         "def build():\n    return Booster(plugin=plugin)\nbooster = build()"),
    )  # fmt: skip
    assert not migration.refused
    assert "    return None\n" in migration.code


def test_the_plugin_of_a_booster_is_the_plugin() -> None:
    migration = migrated(("plugin.prepare_dataloader", "booster.plugin.prepare_dataloader"))
    assert "loader = boosted.loader(data, batch_size=2)\n" in migration.code
    said = refused(
        ("for x in loader", "booster.plugin.stage_manager.is_last_stage()\nfor x in loader")
    )
    assert "`stage_manager` of a plugin has no counterpart." in said


def test_what_an_accelerator_tells_of_memory_is_torchs() -> None:
    migration = migrated(
        ("import colossalai\n", "import colossalai\nfrom colossalai.accelerator import "
         "get_accelerator\nfrom colossalai.logging import disable_existing_loggers\n"
         "disable_existing_loggers()\nprint(get_accelerator().max_memory_allocated())\n"),
    )  # fmt: skip
    assert not migration.refused
    assert "print(torch.cuda.max_memory_allocated())" in migration.code
    assert "loggers" not in migration.code
    assert torch.cuda.max_memory_allocated() >= 0


def test_what_a_plugin_is_given_becomes_options_and_a_norm() -> None:
    migration = migrated(
        ("stage=2,", "stage=1, max_norm=1.5, reduce_bucket_size_in_m=3, verbose=True,")
    )
    strategy = {"name": "colossalai", "plugin": "zero1", "reduce_bucket_size_m": 3}
    assert migration.config["strategy"] == strategy
    assert "max_grad_norm=1.5)" in migration.code


def test_a_booster_that_is_handed_on_is_nothing() -> None:
    migration = migrated(
        ("for x in loader", "def save(booster, model):\n    booster.save_model(model, 'm.pt')\n"
         "save(booster, model)\nfor x in loader"),
    )  # fmt: skip
    assert "booster = None\n" in migration.code
    assert "boosted.save_model(model, 'm.pt')" in migration.code


def test_a_directory_of_shards_is_not_loaded(tmp_path) -> None:
    with pytest.raises(ConfigError, match="is a directory, as shard=True makes it"):
        boosted.load_model(torch.nn.Linear(1, 1), tmp_path)
