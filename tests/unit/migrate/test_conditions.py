"""What a script decides while it runs: whether it is distributed, and in which precision."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from unipar.errors import ConfigError
from unipar.migrate import migrate_source
from unipar.migrated import script
from unipar.migrated.script.run import current

DDP = """\
import os, argparse, torch, torch.distributed as dist
from datetime import timedelta
from torch.nn.parallel import DistributedDataParallel as DDP
world_size = int(os.environ.get("WORLD_SIZE", 1))
if world_size > 1:
    dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
if world_size > 1:
    model = DDP(model)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in data:
    opt.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    opt.step()
"""
AMP = """\
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--use-amp", action="store_true")
args = parser.parse_args()
model = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda", enabled=args.use_amp)
for x, y in data:
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16, enabled=args.use_amp):
        loss = (model(x) - y).square().mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
"""


def test_joining_on_a_condition_stays_on_it() -> None:
    migration = migrate_source(DDP)
    assert "if world_size > 1:\n    script.open()\n" in migration.code
    assert "if world_size > 1:\n    pass\n" in migration.code
    assert "DDP(" not in migration.code
    told = {note.line: note.why for note in migration.notes}
    assert "without a launcher it is one process, as before" in told[6]
    assert "whatever the condition says" in told[9]


SAVE = "torch.save({'model': SAVED.state_dict()}, 'model.pt')\n"


@pytest.mark.parametrize(
    ("lines", "saved", "prefixed"),
    [
        ("", "model", True),
        ("raw = model.module if world_size > 1 else model\n", "raw", False),
        ("def unwrap(m):\n    return m.module if isinstance(m, DDP) else m\n", "unwrap(model)",
         False),
        ("def kept(m):\n    return kept(m) if m.training else m\n", "kept(model)", True),
    ],
)  # fmt: skip
def test_only_names_that_began_with_module_are_told(lines: str, saved: str, prefixed: bool) -> None:
    notes = migrate_source(DDP + lines + SAVE.replace("SAVED", saved)).notes
    assert any("no longer begin with `module.`" in note.why for note in notes) is prefixed


def test_a_model_that_is_named_before_it_is_wrapped_has_no_prefix() -> None:
    wrap = "if world_size > 1:\n    model = DDP(model)\n"
    source = DDP.replace(wrap, f"raw = model\n{wrap}    raw = model.module\n")
    notes = migrate_source(source + SAVE.replace("SAVED", "raw")).notes
    assert not any("module." in note.why for note in notes)


def test_when_to_reduce_is_the_engines_business() -> None:
    source = DDP.replace(
        "    loss.back", "    model.require_backward_grad_sync = True\n    loss.back"
    )
    migration = migrate_source(source)
    assert migration.changed
    assert "require_backward_grad_sync" not in migration.code


def test_what_only_a_wrapper_has_is_refused_or_the_runs() -> None:
    migration = migrate_source(DDP + "print(model.device)\n")
    assert "print(script.device())" in migration.code
    called = migrate_source(DDP + "model._set_static_graph()\n")
    assert called.refused
    assert "this is DDP's own" in str(called.notes)
    inner = DDP.replace(
        "if world_size > 1:\n    model", "raw = model\nif world_size > 1:\n    model"
    )
    assert "print(raw.device)" in migrate_source(inner + "print(raw.device)\n").code


def test_batch_norms_are_converted_by_the_strategy() -> None:
    converted = "model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)\n"
    source = DDP.replace(
        "if world_size > 1:\n    model", f"{converted}if world_size > 1:\n    model"
    )
    migration = migrate_source(source)
    assert migration.config["strategy"] == {"name": "ddp", "sync_batchnorm": True}
    assert "SyncBatchNorm" not in migration.code
    on_demand = source.replace(converted, f"if world_size > 2:\n    {converted}")
    assert "set sync_batchnorm: true" in str(migrate_source(on_demand).notes)


@pytest.mark.parametrize("line", ['    dist.init_process_group("gloo")', "    model = DDP(model)"])
def test_what_only_some_ranks_come_to_is_refused(line: str) -> None:
    source = DDP.replace(f"if world_size > 1:\n{line}", f"if rank == 0:\n{line}")
    assert source != DDP
    migration = migrate_source(source)
    assert migration.refused
    assert any("only some ranks come to it" in note.why for note in migration.notes)


@pytest.mark.parametrize(
    ("given", "seconds"), [("timedelta(minutes=2, seconds=5)", 125.0), ("timedelta(0, n)", None)]
)
def test_the_timeout_of_collectives_is_kept_or_told(given: str, seconds: float | None) -> None:
    migration = migrate_source(DDP.replace('"gloo"', f'"gloo", timeout={given}'))
    assert migration.config.get("timeout") == seconds
    told = any("wait for 1800 seconds" in note.why for note in migration.notes)
    assert told == (seconds is None)


@pytest.mark.parametrize(
    ("old", "new", "precision", "said"),
    [
        ("", "", "fp32", "this is false unless it is asked for. Where it is true, set"),
        ('action="store_true"', 'action="store_false"', "fp16", "for a run in which this is true"),
        ('action="store_true"', "default=True, type=bool", "fp16", ""),
        ("args = parser", "args = parser2", "fp32", "this is false unless"),
        ("enabled=args.use_amp", "enabled=torch.cuda.is_available()", "fp16",
         "for a run in which this is true. Where it is false, set precision: fp32"),
    ],
)  # fmt: skip
def test_precision_by_a_flag(old: str, new: str, precision: str, said: str) -> None:
    assert old in AMP
    migration = migrate_source(AMP.replace(old, new))
    assert migration.changed, [str(note) for note in migration.notes]
    assert migration.config["precision"] == precision
    enabled = new if new.startswith("enabled") else "enabled=args.use_amp"
    assert f"with script.autocast({enabled}):" in migration.code
    notes = [str(note) for note in migration.notes if "precision" in note.why]
    assert (said in notes[0]) if said else not notes


def test_a_scaler_on_another_condition_is_refused() -> None:
    migration = migrate_source(AMP.replace('"cuda", enabled=args.use_amp', '"cuda", enabled=n'))
    assert any("GradScaler has torch's own settings" in note.why for note in migration.notes)


def test_a_region_in_fp32_is_refused() -> None:
    migration = migrate_source(
        AMP.replace("torch.float16, enabled=args.use_amp", "torch.float16, enabled=False")
    )
    assert any("kept in fp32 within half precision" in note.why for note in migration.notes)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    script.close()
    monkeypatch.setattr(current, "config", None)
    file = tmp_path / "unipar.yaml"
    monkeypatch.setattr(current, "file", file)
    yield file
    script.close()


def test_a_flag_that_contradicts_the_settings_is_told(settings: Path) -> None:
    settings.write_text("strategy: single\ndevice: cpu\nprecision: bf16\n")
    assert script.autocast(enabled=True).fast_dtype is torch.bfloat16
    with pytest.raises(ConfigError, match=r"enabled=False.* has precision: bf16\. Set .*fp32"):
        script.autocast(enabled=False)
    settings.write_text("strategy: single\ndevice: cpu\n")
    assert not script.autocast(enabled=False)._enabled
    with pytest.raises(ConfigError, match=r"enabled=True.*precision: fp32\. Set .*bf16 or fp16"):
        script.autocast(enabled=True)
