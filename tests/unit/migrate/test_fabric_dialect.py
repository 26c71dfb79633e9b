"""Fabric scripts: what becomes of their settings, what is refused, and what a run does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from telling import refusal
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from unipar.errors import ConfigError
from unipar.migrate import migrate_source
from unipar.migrated import fabricated, script
from unipar.migrated.script.run import current

HEAD = """\
import torch
from lightning_fabric import Fabric
fabric = Fabric(devices=2)
fabric.launch()
model = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
model, opt = fabric.setup(model, opt)
"""
LOOP = """\
for x, y in data:
    opt.zero_grad()
    loss = (model(x) - y).square().mean()
    fabric.backward(loss)
    opt.step()
"""


@pytest.mark.parametrize(
    ("given", "config", "left"),
    [
        ("", {"strategy": "auto"}, ""),
        ("devices=2", {"strategy": "ddp"}, "devices=2"),
        ("devices=args.n", {"strategy": "auto"}, "devices=args.n"),
        ("accelerator='gpu', precision='16-mixed'",
         {"strategy": "auto", "precision": "fp16", "device": "cuda"}, ""),
        ("strategy='fsdp', num_nodes=1, precision='32-true'", {"strategy": "fsdp"}, ""),
        ("strategy='deepspeed_stage_3', devices=4, precision='bf16-mixed'",
         {"strategy": "zero3", "precision": "bf16"}, "devices=4"),
        ("strategy='ddp_find_unused_parameters_true'",
         {"strategy": {"name": "ddp", "find_unused_parameters": True}}, ""),
        ("strategy=s.DDPStrategy(static_graph=True, start_method='popen')",
         {"strategy": {"name": "ddp", "static_graph": True}}, ""),
        ("strategy=s.FSDPStrategy(auto_wrap_policy={torch.nn.Linear}, cpu_offload=False)",
         {"strategy": {"name": "fsdp", "wrap": ["Linear"]}}, ""),
    ],
)  # fmt: skip
def test_settings_go_into_the_run_config(given: str, config: dict, left: str) -> None:
    source = "import lightning_fabric.strategies as s\n" + HEAD.replace("devices=2", given) + LOOP
    migration = migrate_source(source)
    assert not migration.refused, migration.notes
    assert migration.config == config
    assert f"fabric = fabricated.Run({left})\n" in migration.code
    assert "script.backward(loss, opt)\n" in migration.code
    assert "fabric.setup" not in migration.code
    assert migration.launcher == "python"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("from lightning_fabric import Fabric", "from lightning.fabric import Fabric"),
        ("from lightning_fabric import Fabric", "from lightning import Fabric"),
        ("from lightning_fabric import Fabric\nfabric = Fabric",
         "import lightning as L\nfabric = L.Fabric"),
    ],
)  # fmt: skip
def test_fabric_is_known_by_all_its_names(old: str, new: str) -> None:
    assert old in HEAD
    migration = migrate_source(HEAD.replace(old, new) + LOOP)
    assert migration.changed, migration.notes
    assert "fabric = fabricated.Run(devices=2)" in migration.code


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("devices=2", "precision='bf16-true'", "knows no precision 'bf16-true'"),
        ("devices=2", "precision=args.p", "which precision it computes in is decided while"),
        ("devices=2", "strategy='dp'", "there is no strategy like 'dp'"),
        ("devices=2", "num_nodes=2", "takes no `num_nodes=2`"),
        ("devices=2", "callbacks=[c]", "takes no `callbacks=[c]`"),
        ("devices=2", "strategy=DeepSpeedStrategy(stage=2)",
         "what DeepSpeedStrategy does cannot be read"),
        ("model, opt = fabric.setup(model, opt)", "fabric.setup(*both)",
         "it cannot be seen what is set up"),
        ("model, opt = fabric.setup(model, opt)", "",
         "its model is not set up, so its replicas drift apart. Give it to fabric.setup."),
        ("fabric.launch()", "fabric.call('on_start')", "a fabricated.Run has nothing like it"),
        ("fabric.launch()", "class T(Fabric): pass", "it is a Fabric itself"),
        ("fabric.launch()", "f = Fabric()", "a process has one run"),
        ("import torch\n", "import torch, lightning.pytorch\n", "it takes part in training"),
        ("    opt.step()", "    fabric.clip_gradients(model, opt, clip_val=1)\n    opt.step()",
         "strategies clip by the 2-norm"),
        ("    opt.step()", "    fabric.all_reduce(loss, group=g)\n    opt.step()",
         "`group` is not known"),
    ],
)  # fmt: skip
def test_what_a_run_has_not_is_refused(old: str, new: str, said: str) -> None:
    source = HEAD + LOOP
    assert old in source
    head = "from lightning_fabric.strategies import DeepSpeedStrategy\n"
    assert said in refusal((head if "DeepSpeed" in new else "") + source.replace(old, new, 1))


def test_what_the_command_line_decided_is_told() -> None:
    source = HEAD.replace("devices=2", "strategy=args.strategy, accelerator=args.accelerator")
    told = [note.why for note in migrate_source(source + LOOP).notes]
    assert "unipar.yaml's `strategy` decides now, not the command line." in told
    assert "unipar.yaml's `device` decides now, not the accelerator." in told


@pytest.mark.parametrize(("given", "told"), [("", True), ("devices=2", False)])
def test_what_fabric_run_decided_is_told(given: str, told: bool) -> None:
    migration = migrate_source(HEAD.replace("devices=2", given) + LOOP)
    notes = [note.why for note in migration.notes if note.kind == "changed"]
    why = "what `fabric run` was given for it on the command line, it is no longer."
    assert (why in notes) is told


def test_seeds_of_ranks_are_called_out() -> None:
    line = "fabric.seed_everything(1 + fabric.global_rank)\n"
    migration = migrate_source(HEAD.replace("model =", f"{line}model =") + LOOP)
    assert any(note.why.startswith("each rank has a seed of its own") for note in migration.notes)


def test_models_that_are_not_trained_are_only_moved() -> None:
    line = "teacher = fabric.setup(torch.nn.Linear(1, 1))\n"
    code = migrate_source(HEAD + line + LOOP).code
    assert "teacher = fabric.to_device(torch.nn.Linear(1, 1))\n" in code


def test_a_function_that_is_launched_is_followed() -> None:
    body = "".join(f"    {line}\n" for line in (HEAD + LOOP).splitlines()[4:])
    source = (
        "import torch\nfrom lightning_fabric import Fabric\n"
        f"def main(fabric, data):\n{body}\nFabric(devices=2).launch(main, [])\n"
    )
    code = migrate_source(source).code
    assert "script.backward(loss, opt)" in code
    assert "fabricated.Run(devices=2).launch(main, [])" in code


# -- what a run does -----------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[fabricated.Run]:
    file = tmp_path / "unipar.yaml"
    file.write_text("strategy: ddp\ndevice: cpu\n")
    monkeypatch.setattr(current, "file", file)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    yield fabricated.Run(devices=1)
    script.close()


def test_what_is_saved_is_loaded_into_what_is_there(run: fabricated.Run, tmp_path: Path) -> None:
    def build() -> tuple[nn.Linear, torch.optim.Optimizer]:
        model = nn.Linear(2, 1)
        engine = script.prepare(
            model, optimizer=lambda named: torch.optim.Adam([p for _, p in named], lr=0.1)
        )
        assert engine.optimizer is not None
        return model, engine.optimizer

    model, optimizer = build()
    script.backward(script.engine(model)(torch.ones(3, 2)).sum(), optimizer)
    script.engine(optimizer).step()
    path = tmp_path / "deep" / "a.ckpt"
    run.save(path, {"model": model, "optimizer": optimizer, "epoch": 3, "more": 1})
    other, its = build()
    state = {"model": other, "optimizer": its, "epoch": 0}
    assert run.load(path, state) == {"more": 1}
    assert state["epoch"] == 3
    assert torch.equal(other.weight, model.weight)
    assert its.state[other.weight]["step"] == 1
    with pytest.raises(ConfigError, match=r"holds model, .*, and not rate\. Leave these out"):
        run.load(path, {"rate": 1})
    assert run.load(path, {"rate": 1}, strict=False).keys() >= {"model", "optimizer"}


def test_loaders_shuffle_by_the_seed_and_anew_each_time(run: fabricated.Run) -> None:
    data = TensorDataset(torch.arange(8))
    loader = run.setup_dataloaders(DataLoader(data, batch_size=4, shuffle=True))
    orders = [torch.cat([batch for (batch,) in loader]).tolist() for _ in range(2)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == list(range(8))
    again = run.setup_dataloaders(DataLoader(data, batch_size=4, shuffle=True))
    assert torch.cat([batch for (batch,) in again]).tolist() == orders[0]


def test_batches_that_cannot_be_shared_are_refused(run: fabricated.Run) -> None:
    class Own(BatchSampler):
        pass

    data = TensorDataset(torch.arange(8))
    loader = DataLoader(data, batch_sampler=Own(SequentialSampler(data), 2, False))
    with pytest.raises(ConfigError, match="in batches of Own, which cannot be shared"):
        run.setup_dataloaders(loader)
    assert len(list(run.setup_dataloaders(loader, use_distributed_sampler=False))) == 4


def test_a_number_of_devices_that_is_none_is_refused(run: fabricated.Run) -> None:
    with pytest.raises(ConfigError, match="devices='many' is no number"):
        fabricated.Run(devices="many").launch()
    with pytest.raises(ConfigError, match=r"reduce_op='max' is not known"):
        run.all_reduce(torch.ones(1), reduce_op="max")


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("from lightning_fabric import Fabric", ""),
        ("from lightning_fabric import Fabric\nimport math, lightning_fabric.utilities as u",
         "import math\n"),
        ("from lightning_fabric import Fabric, loggers, seed_everything\nloggers.CSVLogger('a')",
         "from lightning_fabric import loggers\n"),
        ("from lightning_fabric import Fabric, loggers as kept\nkept.CSVLogger('a')",
         "from lightning_fabric import loggers as kept\n"),
        ("from lightning_fabric import Fabric\nfrom .fabric import log\nfrom . import report",
         "from .fabric import log\nfrom . import report\n"),
    ],
)  # fmt: skip
def test_what_is_imported_of_fabric_goes_where_nothing_is_left(given: str, left: str) -> None:
    head = HEAD.replace("from lightning_fabric import Fabric", given)
    migration = migrate_source(f"{head}{LOOP}")
    assert not migration.refused
    assert left in migration.code
    assert migration.code.count("lightning_fabric") == left.count("lightning_fabric")


def test_an_annotation_says_what_takes_fabrics_place() -> None:
    head = HEAD.replace("fabric.launch()", "def report(fabric: Fabric) -> None: ...")
    code = migrate_source(f"{head}{LOOP}").code
    assert "def report(fabric: fabricated.Run) -> None: ..." in code
    assert "lightning_fabric" not in code


@pytest.mark.parametrize(
    ("given", "config"),
    [
        ("", {"strategy": "ddp", "precision": "bf16", "device": "cpu"}),
        ("precision=None", {"strategy": "ddp", "device": "cpu"}),
        ("'cuda', precision='32-true'", {"strategy": "ddp", "device": "cuda"}),
    ],
)
def test_what_a_class_is_built_with_is_followed(given: str, config: dict[str, Any]) -> None:
    holder = (
        "class Loop:\n"
        "    def __init__(self, accelerator='cpu', precision='bf16-mixed', strategy='ddp'):\n"
        "        self.fabric = Fabric(\n"
        "            accelerator=accelerator, precision=precision, strategy=strategy)\n"
        f"fabric = Loop({given}).fabric\n"
    )
    source = HEAD.replace("fabric = Fabric(devices=2)\n", holder) + LOOP
    assert "class Loop" in source
    migration = migrate_source(source)
    assert not migration.refused, migration.notes
    assert migration.config == config


def test_what_a_derived_class_gives_is_not_guessed() -> None:
    holder = (
        "class Loop:\n"
        "    def __init__(self, precision='32-true'):\n"
        "        self.fabric = Fabric(precision=precision)\n"
        "class Half(Loop):\n"
        "    def __init__(self):\n"
        "        super().__init__('bf16-mixed')\n"
        "fabric = Loop().fabric\n"
    )
    source = HEAD.replace("fabric = Fabric(devices=2)\n", holder) + LOOP
    assert "which precision it computes in is decided while it runs." in refusal(source)
