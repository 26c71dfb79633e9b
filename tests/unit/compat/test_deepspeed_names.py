"""Every public name and key of the real DeepSpeed is kept, ignored or refused, by one table."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from unipar.compat import deepspeed as face
from unipar.compat.deepspeed.ops import adam
from unipar.compat.deepspeed.runtime import lr_schedules, zero
from unipar.compat.deepspeed_names import (
    ACCELERATOR,
    ADAM,
    CHECKPOINTING,
    COMM,
    CONFIG,
    ENGINE,
    OPS,
    OPTIMIZER,
    SCHEDULES,
    TOP,
    UTILS,
    ZERO,
    ZERO_MODULE,
)
from unipar.compat.run import current
from unipar.errors import ConfigError

# In a process of its own: what it imports must not be there when the face is tested.
LISTING = """
import inspect, json, tempfile, types
import deepspeed, deepspeed.ops.adam, deepspeed.pipe, deepspeed.moe.layer, torch
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
def names(module):
    prefix = module.__name__ + "."
    def own(n, v):
        if isinstance(v, types.ModuleType):
            return v.__name__ == prefix + n
        home = getattr(v, "__module__", None)
        return home is None or home.split(".")[0] in ("deepspeed", "torch")
    return sorted(n for n, v in vars(module).items() if not n.startswith("_") and own(n, v))
def signature(function):
    found = inspect.signature(inspect.unwrap(function)).parameters.items()
    return [n for n, p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
seen = set()
class Asked(dict):
    # DeepSpeed's configuration has no list of its keys but what it asks for.
    def get(self, key, default=None):
        seen.add(key)
        return super().get(key, default)
    def __contains__(self, key):
        seen.add(key)
        return super().__contains__(key)
    def __getitem__(self, key):
        seen.add(key)
        return super().__getitem__(key)
DeepSpeedConfig(Asked(train_batch_size=8))
members = [n for n in dir(DeepSpeedEngine) if not n.startswith("_")
           and not hasattr(torch.nn.Module, n)]
# It would compile a kernel, and wait without end where another process was killed as it did.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo", auto_mpi_discovery=False, rank=0, world_size=1,
                           init_method="file://" + tempfile.mktemp())
layer = torch.nn.Linear(1, 1)
engine, *_ = deepspeed.initialize(model=layer, optimizer=torch.optim.SGD(layer.parameters(), 0.1),
                                  config={"train_batch_size": 1})
attributes = sorted(n for n in {*vars(engine), "module"} - {*vars(torch.nn.Module())}
                    if not n.startswith("_") and n not in members)
given = torch.optim.SGD(layer.parameters(), 0.1)
zero = deepspeed.initialize(model=layer, optimizer=given, config={
    "train_batch_size": 1, "zero_optimization": {"stage": 1}, "bf16": {"enabled": True},
    "zero_allow_untested_optimizer": True})[0].optimizer
schedules = ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"]
def rates(kind, given, steps):
    at = torch.optim.Adam([{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)], "lr": 0.3}],
                          lr=0.1)
    made = getattr(lr_schedules, kind)(at, **given)
    found = [[(g["lr"], g["betas"]) for g in at.param_groups]]
    for _ in range(steps):
        made.step()
        found.append([(g["lr"], g["betas"]) for g in at.param_groups])
    return found
functions = {
    "initialize": deepspeed.initialize, "init_distributed": deepspeed.init_distributed,
    "add_config_arguments": deepspeed.add_config_arguments,
    "zero.Init": deepspeed.zero.Init, "zero.GatheredParameters": deepspeed.zero.GatheredParameters,
    "ops.adam.FusedAdam": deepspeed.ops.adam.FusedAdam,
    "ops.adam.DeepSpeedCPUAdam": deepspeed.ops.adam.DeepSpeedCPUAdam,
    "checkpointing.configure": deepspeed.checkpointing.configure,
    "utils.log_dist": deepspeed.utils.log_dist,
    **{f"runtime.lr_schedules.{n}": getattr(lr_schedules, n) for n in schedules},
}
print("found:" + json.dumps({
    "top": names(deepspeed), "comm": names(deepspeed.comm), "utils": names(deepspeed.utils),
    "ops": names(deepspeed.ops), "adam": names(deepspeed.ops.adam), "zero": names(deepspeed.zero),
    "schedules": names(lr_schedules), "pipe": names(deepspeed.pipe),
    "moe": names(deepspeed.moe.layer), "checkpointing": names(deepspeed.checkpointing),
    "accelerator": [n for n in dir(deepspeed.get_accelerator()) if not n.startswith("_")],
    "optimizer": [n for n in dir(zero) if not n.startswith("_") and not hasattr(given, n)],
    "members": members, "attributes": attributes, "config": sorted(seen - {"amp"}),
    "stages": sorted(f.alias or n for n, f in DeepSpeedZeroConfig.model_fields.items()),
    "signatures": {n: signature(f) for n, f in functions.items()},
    "methods": {n: signature(getattr(DeepSpeedEngine, n)) for n in members
                if inspect.isfunction(inspect.unwrap(getattr(DeepSpeedEngine, n)))},
    "rates": [rates(*one) for one in json.loads(input())],
}))
"""

RATES = [
    ("WarmupLR", {"warmup_num_steps": 4}, 7),
    ("WarmupLR", {"warmup_min_lr": [0.01, 0.02], "warmup_max_lr": 0.2, "warmup_num_steps": 3,
                  "warmup_type": "linear"}, 5),
    ("WarmupDecayLR", {"total_num_steps": 9, "warmup_num_steps": 3}, 11),
    ("WarmupCosineLR", {"total_num_steps": 9, "warmup_num_steps": 3, "warmup_min_ratio": 0.1}, 12),
    ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 3,
                  "decay_step_size": 2, "decay_lr_rate": 0.5, "decay_mom_rate": 0.1}, 12),
    ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 6,
                  "cycle_second_step_size": 4, "cycle_first_stair_count": 3,
                  "cycle_momentum": False}, 12),
    ("LRRangeTest", {"lr_range_test_step_size": 2, "lr_range_test_staircase": True}, 6),
    ("LRRangeTest", {"lr_range_test_min_lr": [0.1, 0.2], "lr_range_test_step_size": 3}, 6),
]  # fmt: skip


@functools.cache
def real() -> dict[str, Any]:
    pytest.importorskip("deepspeed")
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", LISTING], input=json.dumps(RATES), capture_output=True, text=True,
        check=True, timeout=120, env={**os.environ, **ranks},
    )  # fmt: skip
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("found:"))
    return json.loads(line.removeprefix("found:"))


SCOPES = {
    "top": (TOP, face),
    "comm": (COMM, face.comm),
    "utils": (UTILS, face.utils),
    "ops": (OPS, face.ops),
    "adam": (ADAM, adam),
    "zero": (ZERO_MODULE, zero),
    "schedules": (SCHEDULES, lr_schedules),
    "checkpointing": (CHECKPOINTING, face.checkpointing),
}


@pytest.mark.parametrize("scope", SCOPES)
def test_every_name_has_one_fate(scope: str) -> None:
    table, module = SCOPES[scope]
    assert len(real()[scope]) >= 4
    for name in real()[scope]:
        row = table.find(name)
        if row is None:
            # Torch's and typing's classes, which a module of DeepSpeed's has imported.
            assert hasattr(torch.nn, name) or hasattr(torch.optim, name) or name == "torch", name
        elif row.fate != "refused":
            assert getattr(module, name) is not None
        elif name not in vars(module):  # Where it has been imported.
            with pytest.raises(ImportError, match=f"{module.__name__} has no {name}. .*"):
                exec(f"from {module.__name__} import {name}", {})


@pytest.mark.parametrize("name", ["pipe", "moe"])
def test_stages_and_experts_are_refused_with_what_to_do(name: str) -> None:
    module = importlib.import_module(f"unipar.compat.deepspeed.{name}")
    assert real()[name]
    for one in real()[name]:
        with pytest.raises(ImportError, match=r"strategy: mesh with (pp|ep) \(docs/how-to/"):
            exec(f"from {module.__name__} import {one}", {})


def test_every_method_and_property_has_one_fate() -> None:
    assert len(real()["members"]) > 100
    for name in real()["members"]:
        row = ENGINE.find(name)
        assert row is not None, f"engine.{name} is in none of the rows"
        there = hasattr(face.DeepSpeedEngine, name)
        assert there == (row.fate != "refused") or name == "compile", f"engine.{name}"


def test_every_attribute_has_one_fate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("unipar.compat.run.file_beside_script", lambda: tmp_path / "unipar.yaml")
    layer = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    engine, *_ = face.initialize(model=layer, optimizer=optimizer, config={"train_batch_size": 1})
    try:
        assert len(real()["attributes"]) > 50
        for name in real()["attributes"]:
            row = ENGINE.find(name)
            assert row is not None, f"engine.{name} is in none of the rows"
            if row.fate == "refused":
                with pytest.raises(ConfigError, match=f"engine.{name} has no counterpart"):
                    getattr(engine, name)
                with pytest.raises(ConfigError, match=f"engine.{name} = None has no counterpart"):
                    setattr(engine, name, None)
            else:
                getattr(engine, name)
        engine.timers("forward").start()
        engine.timers.log(["forward"])
        assert engine.timers("forward").elapsed() == 0
        total = torch.ones(1)
        torch.distributed.all_reduce(total, group=engine.data_parallel_group)
    finally:
        current.close()


def test_every_attribute_of_its_optimizer_has_one_fate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("unipar.compat.run.file_beside_script", lambda: tmp_path / "unipar.yaml")
    layer = torch.nn.Linear(1, 1)
    own = torch.optim.SGD(layer.parameters(), 0.1)
    config = {"train_batch_size": 1}
    engine, optimizer, *_ = face.initialize(model=layer, optimizer=own, config=config)
    kept = {name for row in OPTIMIZER.rows if row.fate == "kept" for name in row.names.split()}
    assert kept <= {*real()["optimizer"]}
    try:
        assert engine.optimizer is optimizer
        assert [getattr(optimizer, name) for name in sorted(kept)] == [1.0, 1.0, False]
        assert len(real()["optimizer"]) > 50
        for name in (*real()["optimizer"], "_global_grad_norm"):
            # Some are the face's own.
            if name not in kept and not hasattr(type(optimizer), name) and name != "optimizer":
                said = f"optimizer has no {name} here. .*(Use|Look|Leave|Engines scale)"
                with pytest.raises(AttributeError, match=said):
                    getattr(optimizer, name)
    finally:
        current.close()


def test_every_name_of_the_accelerator_has_one_fate() -> None:
    made = face.get_accelerator()
    for name in real()["accelerator"]:
        row = ACCELERATOR.find(name)
        assert row is not None, name
        assert hasattr(made, name) == (row.fate != "refused"), name


def test_every_key_of_a_configuration_has_one_fate() -> None:
    for scope, table in (("config", CONFIG), ("stages", ZERO)):
        assert len(real()[scope]) > 30
        for name in real()[scope]:
            assert table.find(name) is not None, f"{name} is in none of the rows"


def test_signatures_are_deepspeeds() -> None:
    for path, expected in real()["signatures"].items():
        found: Any = face
        for part in path.split("."):
            found = getattr(found, part)
        assert list(inspect.signature(found).parameters) == expected, path
    for name, expected in real()["methods"].items():
        row = ENGINE.find(name)
        if row is not None and row.fate != "refused" and name not in ("forward", "destroy"):
            own = inspect.signature(getattr(face.DeepSpeedEngine, name)).parameters
            assert list(own)[: len(expected)] == expected, name


def test_rows_name_nothing_that_is_not_there() -> None:
    tables = {"members": ENGINE, "accelerator": ACCELERATOR, **{k: v[0] for k, v in SCOPES.items()}}
    others = {
        "forward",
        "train",
        "eval",
        "zero_grad",
        "logger",
        "see_memory_usage",
    }
    for scope, table in tables.items():
        for row in table.rows:
            for name in row.names.split():
                known = name in real()[scope] or name in others or "*" in name
                known |= scope == "members" and name in real()["attributes"]
                assert known or row.fate == "refused" or scope == "top", f"{name} of {scope}"


def test_rates_are_deepspeeds() -> None:
    for (kind, given, steps), expected in zip(RATES, real()["rates"], strict=True):
        groups = [{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)], "lr": 0.3}]
        optimizer = torch.optim.Adam(groups, lr=0.1)
        schedule = getattr(lr_schedules, kind)(optimizer, **given)
        for step in range(steps + 1):
            found = [value for g in optimizer.param_groups for value in (g["lr"], *g["betas"])]
            wanted = [value for lr, betas in expected[step] for value in (lr, *betas)]
            assert found == pytest.approx(wanted, rel=1e-12), (kind, step)
            schedule.step()


def test_the_face_imports_nothing_of_deepspeed() -> None:
    code = (
        "import sys, unipar.compat.deepspeed, unipar.compat.deepspeed.pipe\n"
        "print([n for n in sys.modules if n.split('.')[0] in ('accelerate', 'deepspeed')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["[]"]
