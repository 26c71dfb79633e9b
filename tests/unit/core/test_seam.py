"""Everything that the values of the seam say has somebody who reads it."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

import unipar
from unipar.strategy import Capabilities, EngineSpec, StepResult
from unipar.world import Placement, World

CORE = Path(unipar.__file__).parent
READERS = [
    *CORE.rglob("*.py"),
    *(CORE.parent / "backends").glob("*/unipar_*/**/*.py"),
    *(CORE.parent / "docs").glob("*.py"),
]

NAMES = {
    Capabilities: {"able", "capabilities"},
    EngineSpec: {"spec"},
    StepResult: {"done", "result"},
    Placement: {"placement"},
    World: {"world"},
}
"""What each is called where it is read: a field's name alone may be another class's too."""


@functools.cache
def reads() -> set[tuple[str, str]]:
    """Every attribute that is read, behind the last name of what it is read of.

    ``self._world.rank`` is ``("world", "rank")``, ``strategy.capabilities().sharded`` is
    ``("capabilities", "sharded")``, and ``self.rank`` says nothing.
    """
    found = set()
    for path in READERS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                of = node.value.func if isinstance(node.value, ast.Call) else node.value
                if isinstance(of, ast.Name | ast.Attribute):
                    name = of.id if isinstance(of, ast.Name) else of.attr
                    found.add((name.lstrip("_"), node.attr))
    return found


def public(kind: type) -> set[str]:
    """The fields and properties that a class itself has."""
    found = {name for name, value in vars(kind).items() if isinstance(value, property)}
    return found | vars(kind).get("__annotations__", {}).keys()


@pytest.mark.parametrize("kind", NAMES, ids=lambda kind: kind.__name__)
def test_every_field_is_read(kind: type) -> None:
    assert public(kind)
    read = {field for name, field in reads() if name in NAMES[kind]}
    assert public(kind) - read == set()
