"""Scopes and the order of nodes are those that LibCST's own, slower passes find."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path
from typing import Any

import libcst as cst
import pytest
from libcst.metadata import BuiltinAssignment, MetadataWrapper, ScopeProvider

from unipar.migrate.source import Source

CODE = """\
import os.path, sys as system
from .models import Net as N, other
total = 0
@N(total)
class C(Base, key=total):
    total = 1
    inside = [total for total in range(total) if total]
    def method(self, given: total = total, *rest, named=N, **more) -> "N":
        global late
        late = lambda x, y=given: (x, y, late, total)
        def inner():
            nonlocal given
            given = rest = [(z := w) for v in more for w in v]
            return given, z, rest
        with open(late) as (a, self.b), inner() as (c):
            del a
        try:
            for i, (j, *k) in enumerate(named): i += j
        except (OSError, N) as error: print(error, i, k)
        match given:
            case {"a": 1, **left} if left: return left
            case [N(x=first), *tail] | (first as tail): return first, tail
        return late if total else {k: v for k, v in more.items()}
late = C().method(given=late, total=total)[late:total].late
"""


def bindings(source: Source) -> tuple[dict[int, Any], dict[int, Any]]:
    """Where each name is bound, by LibCST and by us."""
    theirs, ours = {}, {}
    scopes: Any = MetadataWrapper(source.tree, unsafe_skip_copy=True).resolve(ScopeProvider)
    for node in source.all(cst.Name):
        own = source.scope(node)
        if scopes.get(node) is None:  # It also gives none to the names in `global`.
            assert own is None or isinstance(source.parent(node), cst.NameItem), node.value
            continue
        assert own is not None, node.value
        theirs[id(node)] = {
            None if isinstance(one, BuiltinAssignment) else source.span(one.node)
            for one in scopes[node][node.value]
        }
        ours[id(node)] = {
            None if one.node is None else source.span(one.node) for one in own[node.value]
        }
    return theirs, ours


def of_library(count: int) -> list[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [p for p in sorted(root.glob("*.py")) if 2_000 < p.stat().st_size < 20_000]
    return [p.read_text() for p in random.Random(0).sample(files, count)]


@pytest.mark.parametrize("text", [CODE, *of_library(4)], ids=lambda text: text[:20])
def test_names_are_bound_where_libcst_says(text: str) -> None:
    theirs, ours = bindings(Source("code.py", text, "code"))
    known = {name: places for name, places in theirs.items() if places}
    assert len(known) > 30
    assert {name: ours[name] for name in known} == known


def test_names_that_libcst_does_not_follow_are_bound() -> None:
    source = Source("code.py", CODE, "code")
    for name, count in {"z": 1, "left": 1, "first": 2, "tail": 2}.items():
        node = [one for one in source.all(cst.Name) if one.value == name][-1]
        scope = source.scope(node)
        assert scope is not None
        assert len(scope[name]) == count


@pytest.mark.parametrize("text", [CODE, *of_library(4)], ids=lambda text: text[:20])
def test_nodes_come_in_the_order_of_the_code(text: str) -> None:
    source = Source("code.py", text, "code")
    kinds = (cst.BaseExpression, cst.BaseStatement, cst.BaseSmallStatement, cst.Param)
    stack: list[cst.CSTNode] = [source.tree]
    expected: list[cst.CSTNode] = []
    while stack:
        node = stack.pop()
        expected += [node] if isinstance(node, kinds) else []
        stack.extend(reversed(node.children))
    found = [node for node in source.nodes if isinstance(node, kinds)]
    assert len(found) == len(expected)
    assert all(one is other for one, other in zip(found, expected, strict=True))


def test_what_imports_bind_names_to() -> None:
    source = Source("code.py", CODE, "code")
    scope = source.scope(source.tree)
    assert scope is not None
    names = ("os", "system", "N", "other")
    assert [scope[name][0].imported for name in names] == [
        "os", "sys", ".models.Net", ".models.other"
    ]  # fmt: skip
