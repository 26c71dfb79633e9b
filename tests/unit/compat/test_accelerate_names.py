"""Every public name of the real Accelerate is kept, ignored or refused, by one table."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import subprocess
import sys
from typing import Any

import pytest

from unipar.compat import accelerate as face
from unipar.compat.accelerate import utils
from unipar.compat.accelerate.plugins import PLUGINS
from unipar.compat.accelerate_names import ACCELERATOR, TOP, UTILS

# In a process of its own: what it imports must not be there when the face is tested.
LISTING = """
import dataclasses, inspect, json, types
import accelerate, accelerate.utils as utils
def names(module):
    found = {n: v for n, v in vars(module).items() if not n.startswith("_")}
    # Of its submodules only what is not one of Python's own files of the package.
    return sorted(n for n, v in found.items()
                  if not isinstance(v, types.ModuleType) or v.__name__ == f"accelerate.{n}")
def signature(function):
    return [n for n, p in inspect.signature(function).parameters.items()
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
kept = json.loads(input())
members = [n for n in dir(accelerate.Accelerator) if not n.startswith("_")]
found = {
    "top": names(accelerate), "utils": [n for n in names(utils)
        if not isinstance(getattr(utils, n), types.ModuleType)], "members": members,
    "signatures": {n: signature(getattr(accelerate.Accelerator, n)) for n in ["__init__", *members]
                   if inspect.isfunction(getattr(accelerate.Accelerator, n))},
    "fields": {n: {f.name: None if f.default is dataclasses.MISSING else str(f.default)
                   for f in dataclasses.fields(getattr(utils, n))} for n in kept},
}
print(json.dumps(found))
"""


@functools.cache
def real() -> dict[str, Any]:
    pytest.importorskip("accelerate")
    kept = json.dumps([kind.__name__ for kind in PLUGINS])
    done = subprocess.run(
        [sys.executable, "-c", LISTING], input=kept, capture_output=True, text=True, check=True,
        timeout=60,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("scope", "table", "module"),
    [("top", TOP, face), ("utils", UTILS, utils)],
    ids=["top", "utils"],
)
def test_every_name_has_one_fate(scope: str, table: Any, module: Any) -> None:
    assert len(real()[scope]) > 20
    for name in real()[scope]:
        row = table.find(name)
        assert row is not None, f"{name} is in none of the rows"
        if row.fate != "refused":
            assert getattr(module, name) is not None
            continue
        with pytest.raises(ImportError, match=f"{module.__name__} has no {name}. .*"):
            exec(f"from {module.__name__} import {name}", {})


def test_every_method_and_property_has_one_fate() -> None:
    for name in real()["members"]:
        row = ACCELERATOR.find(name)
        assert row is not None, f"Accelerator.{name} is in none of the rows"
        there = hasattr(face.Accelerator, name)
        assert there or row.fate == "refused", f"Accelerator.{name}"


def test_signatures_are_accelerates() -> None:
    for name, expected in real()["signatures"].items():
        row = ACCELERATOR.find(name)
        if row is not None and row.fate == "refused":
            continue
        function = getattr(face.Accelerator, name)
        own = [n for n in inspect.signature(function).parameters if n in expected]
        # What is taken by position must stand where it did; on_… take a function alone.
        assert own == expected, name


def test_fields_of_plugins_are_accelerates_with_their_defaults() -> None:
    for kind in PLUGINS:
        given = real()["fields"][kind.__name__]
        own = {one.name: one.default for one in dataclasses.fields(kind)}  # pyright: ignore[reportArgumentType]
        assert list(own) == list(given), kind.__name__
        assert {*kind.REFUSED, *kind.IGNORED} <= {*own}
        for name, default in given.items():
            if default is not None and own[name] is not dataclasses.MISSING:
                assert str(own[name]) == default, f"{kind.__name__}.{name}"


def test_rows_name_nothing_that_is_not_there() -> None:
    for scope, table in (("top", TOP), ("utils", UTILS), ("members", ACCELERATOR)):
        for row in table.rows:
            for name in row.names.split():
                if row.fate == "kept" and "*" not in name:
                    assert name in real()[scope], f"{name} of {scope} is none of Accelerate's"


def test_the_face_imports_nothing_of_accelerate() -> None:
    importlib.import_module("unipar.compat.accelerate.local_sgd")
    code = (
        "import sys, unipar.compat.accelerate as face, unipar.compat.accelerate.local_sgd\n"
        "print([n for n in sys.modules if n.split('.')[0] in ('accelerate', 'deepspeed')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["[]"]
