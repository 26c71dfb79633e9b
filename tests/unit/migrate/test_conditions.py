"""What a script decides while it runs: whether it is distributed, and in which precision."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from telling import refusal

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
        ('action="store_true"', 'action="store_false"', "fp16", ""),
        ('action="store_true"', "default=True, type=bool", "fp16", ""),
        ("args = parser", "args = parser2", "fp32", "this is false unless"),
        ('action="store_true"', 'default=None, action="store_true"', "fp32", "unless it is asked"),
        ('action="store_true"', 'action=argparse.BooleanOptionalAction', "fp32", "unless it is"),
        ('action="store_true"', "type=int, default=0", "fp32", "unless it is asked for"),
        ('action="store_true"', 'type=strtobool, default="no"', "fp16", "in which this is true"),
        ('action="store_true")', 'action="store_true")\nparser.set_defaults(use_amp=True)', "fp16",
         ""),
        ('"--use-amp", action="store_true"', '"--precision", default="fp32"', "fp32", "unless"),
        ('"--use-amp", action="store_true"', '"--precision", default="amp"', "fp16", ""),
        ("enabled=args.use_amp", "enabled=torch.cuda.is_available()", "fp16",
         "for a run in which this is true. Where it is false, set precision: fp32"),
    ],
)  # fmt: skip
def test_precision_by_a_flag(old: str, new: str, precision: str, said: str) -> None:
    assert old in AMP
    source = AMP.replace(old, new)
    asked = "enabled=args.use_amp"
    if "--precision" in new:
        asked = 'enabled=args.precision == "amp"'
        source = source.replace("enabled=args.use_amp", asked)
    migration = migrate_source(source)
    assert migration.changed, [str(note) for note in migration.notes]
    assert migration.config["precision"] == precision
    enabled = new if new.startswith("enabled") else asked
    assert f"with script.autocast({enabled}):" in migration.code
    notes = [str(note) for note in migration.notes if "precision" in note.why]
    assert (said in notes[0]) if said else not notes


@pytest.mark.parametrize(
    ("build", "asked", "precision"),
    [
        ("args = Config()", "args.use_amp", "fp32"),
        ("args = Config(use_amp=True)", "args.use_amp", "fp16"),
        ("args = Config()", "args.use_amp and torch.cuda.is_available()", "fp32"),
        ("args = Config()", "args.kind in ('fp16', 'bf16')", "fp32"),
        ("args = Config()", "'fp' in args.kind", "fp16"),
        ("args = Config()", "not args.use_amp", "fp16"),
        ("half = Config().use_amp if torch.cuda.is_available() else False", "half", "fp16"),
        ("half = False if Config().use_amp is None else Config().use_amp", "half", "fp32"),
    ],
)
def test_precision_by_a_setting_of_the_script(build: str, asked: str, precision: str) -> None:
    tail = AMP.split("args = parser.parse_args()\n")[1].replace("args.use_amp", asked)
    config = "@dataclass\nclass Config:\n    use_amp: bool = False\n    kind: str = 'fp32'\n"
    migration = migrate_source(
        f"import torch\nfrom dataclasses import dataclass\n{config}{build}\n{tail}"
    )
    assert migration.changed, [str(note) for note in migration.notes]
    assert migration.config["precision"] == precision


CONTEXT = """\
import argparse, contextlib, functools, torch
parser = argparse.ArgumentParser()
parser.add_argument("--bf16", action="store_true")
args = parser.parse_args()
model = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
{context}
for x, y in data:
    opt.zero_grad()
    with {name}:
        loss = (model(x) - y).square().mean()
    loss.backward()
    opt.step()
"""
HALF = 'torch.autocast("cpu", dtype=torch.bfloat16)'


@pytest.mark.parametrize(
    ("call", "precision"),
    [("train()", "fp32"), ("train(amp=args.bf16)", "fp32"), ("train(True)", "bf16")],
)
def test_precision_by_what_a_function_is_given(call: str, precision: str) -> None:
    head, loop = CONTEXT.split("for x, y")
    loop = f"for x, y{loop}".replace("\n", "\n    ")
    source = f"{head}def train(amp=False):\n    {loop}\n{call}\n"
    half = HALF.replace(")", ", enabled=amp)")
    migration = migrate_source(source.format(context="", name=half))
    assert migration.changed, [str(note) for note in migration.notes]
    assert migration.config["precision"] == precision


@pytest.mark.parametrize(
    ("context", "name"),
    [
        (f"context = {HALF} if args.bf16 else contextlib.nullcontext()", "context"),
        (f"if args.bf16:\n    context = {HALF}\nelse:\n    context = contextlib.nullcontext()",
         "context"),
        ("def half():\n    if not args.bf16:\n        return contextlib.nullcontext()\n"
         f"    return {HALF}", "half()"),
        ("", f"({HALF} if args.bf16 else contextlib.nullcontext())"),
    ],
)  # fmt: skip
def test_autocast_that_a_run_decides_on_is_refused(context: str, name: str) -> None:
    said = refusal(CONTEXT.format(context=context, name=name))
    assert "whether this computes in half precision is decided while it runs" in said
    assert "Write torch.autocast(..., enabled=...) in any case" in said


def test_autocast_that_is_handed_on_is_refused() -> None:
    partial = 'half = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)'
    said = refusal(CONTEXT.format(context=partial, name="half()"))
    assert "autocast is handed on, and it cannot be seen where it is called. Call it here." in said


@pytest.mark.parametrize("dtype", ["torch.float32", "None"])
def test_a_dtype_that_may_be_none_of_half_precision_is_refused(dtype: str) -> None:
    context = f"dtype = torch.bfloat16 if args.bf16 else {dtype}"
    said = refusal(CONTEXT.format(context=context, name='torch.autocast("cpu", dtype=dtype)'))
    assert "its dtype cannot be seen" in said


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
