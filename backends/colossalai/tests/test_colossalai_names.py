"""Every public name of the real Colossal-AI is kept, ignored or refused, by one table."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import subprocess
import sys
from dataclasses import fields
from importlib import metadata
from typing import Any

import pytest
import torch

from unipar.compat.colossalai.booster import Booster
from unipar.compat.colossalai.booster import plugin as plugins
from unipar.compat.colossalai.cluster import DistCoordinator
from unipar.compat.colossalai.interface import OptimizerWrapper
from unipar.compat.colossalai.nn import lr_scheduler, optimizer
from unipar.compat.colossalai_names import BOOSTER, MODULES, OPTIMIZER, PLUGIN

pytestmark = pytest.mark.timeout(300)

OWNERS: dict[str, Any] = {
    "Booster": (Booster, BOOSTER), "DistCoordinator": (DistCoordinator, None),
    "OptimizerWrapper": (OptimizerWrapper, OPTIMIZER),
    **{one.__name__: (one, PLUGIN) for one in plugins.PLUGINS},
}  # fmt: skip
RATES = """
def rates(module, name, arguments):
    import torch
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.4, momentum=0.9)
    schedule = getattr(module, name)(sgd, 12, **arguments)
    found = []
    for _ in range(11):
        found.append(sgd.param_groups[0]["lr"])
        sgd.step()
        schedule.step()
    return found
"""
SCHEDULES: dict[str, dict[str, Any]] = {
    "CosineAnnealingLR": {"eta_min": 0.01}, "CosineAnnealingWarmupLR": {"warmup_steps": 3},
    "ExponentialLR": {"gamma": 0.8}, "FlatAnnealingLR": {"pct_start": 0.3},
    "FlatAnnealingWarmupLR": {"warmup_steps": 2, "pct_start": 0.3},
    "LinearWarmupLR": {"warmup_steps": 3}, "MultiStepLR": {"milestones": [3, 6]},
    "MultiStepWarmupLR": {"warmup_steps": 2, "milestones": [4, 7]}, "OneCycleLR": {},
    "PolynomialLR": {"power": 2.0}, "PolynomialWarmupLR": {"warmup_steps": 2, "end_lr": 0.01},
    "StepLR": {"step_size": 4},
}  # fmt: skip
LISTING = f"""{RATES}
import importlib, inspect, json, pkgutil, types, warnings
warnings.simplefilter("ignore")
from unipar_colossalai.framework import load
load()
modules, classes, schedules = json.loads(input())
def place(module):
    return importlib.import_module(f"colossalai.{{module}}".rstrip("."))
def names(module):
    found = place(module)
    own = {{n for n, v in vars(found).items() if not n.startswith("_")
           and not (isinstance(v, types.ModuleType) and v.__name__ != f"{{found.__name__}}.{{n}}")}}
    return sorted(own | {{one.name for one in pkgutil.iter_modules(getattr(found, "__path__", []))
                         if not one.name.startswith("_")}})
def parameters(function):
    return [[n, None if p.default is p.empty else str(p.default)]
            for n, p in inspect.signature(function).parameters.items()
            if n != "self" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
def find(name):
    return next(getattr(place(m), name) for m in modules if name in vars(place(m)))
print(json.dumps({{
    "names": {{m: names(m) for m in modules}},
    "members": {{n: {{m: parameters(v) if inspect.isfunction(v) else None
                     for m, v in inspect.getmembers(find(n)) if not m.startswith("_")}}
                for n in classes}},
    "built": {{n: parameters(find(n).__init__) for n in [*classes, *schedules]
              if n != "DistCoordinator"}},
    "rates": {{n: rates(place("nn.lr_scheduler"), n, a) for n, a in schedules.items()}},
}}))
"""


@functools.cache
def real() -> dict[str, Any]:
    asked = json.dumps([list(MODULES), list(OWNERS), SCHEDULES])
    done = subprocess.run(
        [sys.executable, "-c", LISTING], input=asked, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("module", list(MODULES), ids=lambda one: one or "colossalai")
def test_every_name_has_one_fate(module: str) -> None:
    face = importlib.import_module(f"unipar.compat.colossalai.{module}".rstrip("."))
    assert real()["names"][module]
    for name in real()["names"][module]:
        row = MODULES[module].find(name)
        assert row is not None, f"{module}.{name} is in none of the rows"
        if row.fate != "refused":
            assert getattr(face, name) is not None
            continue
        with pytest.raises(ImportError, match=f"{face.__name__} has no {name}. .*"):
            exec(f"from {face.__name__} import {name}", {})


def test_the_version_is_colossalais() -> None:
    face = importlib.import_module("unipar.compat.colossalai")
    assert face.__version__ == metadata.version("colossalai").partition("+")[0]


def test_rows_keep_nothing_that_is_not_there() -> None:
    bases = {"DPPluginBase", "PipelinePluginBase"}  # In modules of their own, for annotations.
    for module, table in MODULES.items():
        for row in table.rows:
            for name in () if row.fate == "refused" else row.names.split():
                assert name in bases or name in real()["names"][module], f"{module}.{name}"


@pytest.mark.parametrize("name", list(OWNERS))
def test_every_method_has_one_fate_and_its_arguments(name: str) -> None:
    face, table = OWNERS[name]
    for member, expected in real()["members"][name].items():
        row = table.find(member) if table is not None else None
        if row is not None and row.fate == "refused":
            continue
        assert hasattr(face, member) or member in ("defaults", "param_groups"), member
        assert row is not None or table is None, f"{name}.{member} is in none of the rows"
        function = inspect.getattr_static(face, member, None)
        if expected is None or not inspect.isfunction(function):
            continue
        taken = inspect.signature(function).parameters
        if any(one.kind is one.VAR_POSITIONAL for one in taken.values()):
            continue
        own = [n for n in taken if n in dict(expected)]
        assert own == [n for n, _ in expected], f"{name}.{member}"


@pytest.mark.parametrize("kind", plugins.PLUGINS, ids=lambda one: one.__name__)
def test_plugins_take_the_real_arguments_with_their_defaults(kind: Any) -> None:
    expected = real()["built"][kind.__name__]
    own = {one.name: one for one in fields(kind)}
    own_names = [*inspect.signature(kind).parameters]
    if kind is plugins.MoeHybridParallelPlugin:
        assert own_names[:4] == [name for name, _ in expected][:4]
        own |= {"ep_size": own["tp_size"], "moe_dp_outside": own["dp_outside"]}
        expected = [one for one in expected if one[0] != "overlap_communication"]
    else:
        assert own_names == [name for name, _ in expected]
    for name, default in expected:
        if default is not None:
            assert str(own[name].default) == default, name
    assert {*kind.REFUSED, *kind.DIVIDING} <= {*own}


def test_schedules_have_the_real_rates_and_arguments() -> None:
    scope: dict[str, Any] = {}
    exec(RATES, scope)
    assert {*SCHEDULES} >= {*lr_scheduler.__all__} - {"LambdaLR", "MultiplicativeLR"}
    for name, arguments in SCHEDULES.items():
        assert scope["rates"](lr_scheduler, name, arguments) == pytest.approx(
            real()["rates"][name], rel=1e-12
        ), name
        taken = inspect.signature(getattr(lr_scheduler, name)).parameters
        given = [n for n, p in taken.items() if p.kind is not p.VAR_KEYWORD]
        assert given == [n for n, _ in real()["built"][name]]


def test_hybrid_adam_is_the_real_update() -> None:
    from patched_colossalai import _Kernels

    from unipar_colossalai.framework import load

    load()
    cpu_adam: Any = importlib.import_module("colossalai.nn.optimizer.cpu_adam")
    theirs = importlib.import_module("colossalai.nn.optimizer")
    original, cpu_adam.CPUAdamLoader = cpu_adam.CPUAdamLoader, _Kernels
    try:
        for asked in ({"weight_decay": 0.1}, {"weight_decay": 0.1, "adamw_mode": False}, {}):
            torch.manual_seed(0)
            values, gradients = torch.randn(7), torch.randn(5, 7)
            ends = []
            for module in (theirs, optimizer):
                parameter = torch.nn.Parameter(values.clone())
                kind: Any = module.HybridAdam
                adam = kind([parameter], lr=0.02, betas=(0.8, 0.95), **asked)
                for gradient in gradients:
                    parameter.grad = gradient.clone()
                    adam.step()
                ends.append(parameter.detach())
            assert torch.allclose(*ends, rtol=1e-6, atol=1e-7)
    finally:
        cpu_adam.CPUAdamLoader = original


@pytest.mark.usefixtures("new_interpreters")
def test_the_face_imports_nothing_of_colossalai() -> None:
    modules = [f"unipar.compat.colossalai.{one}".rstrip(".") for one in MODULES]
    code = (
        f"import sys, {', '.join(modules)}\n"
        "print([n for n in sys.modules if n.split('.')[0] in ('colossalai', 'deepspeed')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["[]"]
