"""Every public name of the real Fabric is kept, ignored or refused, by one table."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import subprocess
import sys
from typing import Any

import pytest

from unipar.compat import fabric as face
from unipar.compat import lightning
from unipar.compat.fabric import accelerators, loggers, plugins, strategies, utilities
from unipar.compat.fabric.wrappers import FabricModule
from unipar.compat.fabric_names import (
    ACCELERATORS,
    FABRIC,
    LIGHTNING,
    LOGGERS,
    PLUGINS,
    REFUSED_WORDS,
    STRATEGIES,
    TOP,
    UTILITIES,
)

# In a process of its own: what it imports must not be there when the face is tested.
LISTING = """
import inspect, json, types, warnings
warnings.simplefilter("ignore")
import lightning_fabric as top
from lightning_fabric import accelerators, loggers, plugins, strategies, utilities
from lightning_fabric.plugins import environments
from lightning_fabric.utilities import rank_zero, seed
from lightning_fabric.wrappers import _FabricModule
def names(module, submodules=False):
    return sorted(n for n, v in vars(module).items() if not n.startswith("_")
                  and (not isinstance(v, types.ModuleType)
                       or submodules and v.__name__ == f"lightning_fabric.{n}"))
def signature(function):
    return [n for n, p in inspect.signature(function).parameters.items()
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
def defaults(kind):
    return {n: repr(p.default) for n, p in inspect.signature(kind).parameters.items()
            if p.kind is not p.VAR_KEYWORD}
members = [n for n in dir(top.Fabric) if not n.startswith("_")]
print(json.dumps({
    "top": names(top, True), "strategies": names(strategies), "loggers": names(loggers),
    "plugins": names(plugins) + [n for n in names(environments)],
    "accelerators": names(accelerators), "utilities": names(utilities), "members": members,
    "seed": [n for n in ("seed_everything", "reset_seed", "pl_worker_init_function")
             if hasattr(seed, n)],
    "ranks": [n for n in names(rank_zero) if n.startswith("rank_zero_") and "module" not in n],
    "registered": strategies.STRATEGY_REGISTRY.available_strategies(),
    "signatures": {n: signature(getattr(top.Fabric, n)) for n in ["__init__", *members]
                   if inspect.isfunction(getattr(top.Fabric, n))},
    "methods": [n for n in vars(_FabricModule) if not n.startswith("_")],
    "made": {n: defaults(getattr(m, n)) for m, n in (
        (strategies, "DDPStrategy"), (strategies, "FSDPStrategy"),
        (strategies, "DeepSpeedStrategy"), (strategies, "ModelParallelStrategy"),
        (loggers, "CSVLogger"), (loggers, "TensorBoardLogger"),
        (plugins, "MixedPrecision"), (plugins, "FSDPPrecision"), (plugins, "DeepSpeedPrecision"))},
}))
"""
MODULES = {
    "top": (TOP, face), "strategies": (STRATEGIES, strategies), "plugins": (PLUGINS, plugins),
    "accelerators": (ACCELERATORS, accelerators), "loggers": (LOGGERS, loggers),
    "utilities": (UTILITIES, utilities),
}  # fmt: skip


@functools.cache
def real() -> dict[str, Any]:
    pytest.importorskip("lightning_fabric")
    done = subprocess.run(
        [sys.executable, "-c", LISTING], capture_output=True, text=True, check=True, timeout=60
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("scope", MODULES)
def test_every_name_has_one_fate(scope: str) -> None:
    table, module = MODULES[scope]
    assert len(real()[scope]) >= 3
    for name in real()[scope]:
        if name in ("XLABf16Precision", "logging", "os", "sys", "lightning_fabric"):
            continue
        row = table.find(name)
        assert row is not None, f"{name} is in none of the rows of {scope}"
        if row.fate != "refused":
            assert getattr(module, name) is not None
            continue
        with pytest.raises(ImportError, match=f"{module.__name__} has no {name}. .*"):
            exec(f"from {module.__name__} import {name}", {})


def test_every_method_and_property_has_one_fate() -> None:
    for name in real()["members"]:
        row = FABRIC.find(name)
        assert row is not None, f"Fabric.{name} is in none of the rows"
        assert hasattr(face.Fabric, name)
    # What a model is made of is there once there is one.
    assert all(hasattr(FabricModule, name) for name in {*real()["methods"]} - {"module"})
    assert all(hasattr(utilities, name) for name in (*real()["seed"], *real()["ranks"]))


def test_rows_name_nothing_that_is_not_there() -> None:
    for scope, (table, _) in MODULES.items():
        for row in table.rows:
            for name in row.names.split():
                if row.fate == "kept" and "*" not in name:
                    assert name in real()[scope], f"{name} of {scope} is none of Fabric's"
    assert all(name in real()["members"] for row in FABRIC.rows for name in row.names.split())


def test_signatures_are_fabrics() -> None:
    assert len(real()["signatures"]) > 25
    for name, expected in real()["signatures"].items():
        own = inspect.signature(getattr(face.Fabric, name)).parameters
        # What is taken by position must stand where it did.
        assert [n for n in own if n in expected] == expected, name


def test_what_is_made_takes_fabrics_arguments_with_their_defaults() -> None:
    modules = (strategies, plugins, loggers)
    for name, given in real()["made"].items():
        kind = next(getattr(one, name) for one in modules if name in vars(one))
        own = {n: p.default for n, p in inspect.signature(kind).parameters.items()}
        assert [n for n in own if n in given] == list(given), name
        for argument, default in given.items():
            if default not in ("<class 'inspect._empty'>", repr(inspect.Parameter.empty)):
                assert repr(own[argument]) == default, f"{name}({argument})"


@pytest.mark.parametrize(
    "kind", [strategies.DDPStrategy, strategies.FSDPStrategy, strategies.DeepSpeedStrategy]
)
def test_every_argument_of_a_strategy_is_read_refused_or_ignored(kind: Any) -> None:
    names = {one.name for one in dataclasses.fields(kind)}
    assert {*kind.REFUSED, *kind.IGNORED} <= names
    text = inspect.getsource(kind)
    for name in names - {*kind.REFUSED, *kind.IGNORED, "precision", "timeout", "start_method"}:
        assert text.count(name) > 1, f"{kind.__name__}({name}) is read nowhere"


def test_every_strategy_that_has_a_name_is_read_or_refused() -> None:
    assert {*strategies.NAMED} <= {*real()["registered"]}
    assert {*real()["registered"]} == {*strategies.NAMED} | {
        word for word, call in REFUSED_WORDS.items() if "strategy" in call
    }


def test_names_of_lightning_are_kept_or_refused() -> None:
    for row in LIGHTNING.rows:
        for name in row.names.split():
            if row.fate == "kept":
                assert getattr(lightning, name) is not None
            else:
                with pytest.raises(ImportError, match=f"unipar.compat.lightning has no {name}. "):
                    exec(f"from unipar.compat.lightning import {name}", {})


def test_the_face_imports_nothing_of_lightning() -> None:
    code = (
        "import sys, unipar.compat.lightning\n"
        "print([n for n in sys.modules if n.split('.')[0].startswith(('lightning', 'deepspeed'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["[]"]
