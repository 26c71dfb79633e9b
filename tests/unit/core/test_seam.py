"""What the seam says has somebody who reads it, and what few frameworks offer is no part of it."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

import unipar
from unipar.benchmark.traffic import CollectiveWatcher
from unipar.checkpoint import CheckpointImporter
from unipar.install import Installable
from unipar.sizing import Bidder
from unipar.strategy import Capabilities, EngineSpec, StepResult, Strategy, StrategyOptions
from unipar.strategy.registry import strategy_class
from unipar.world import Placement, World

CORE = Path(unipar.__file__).parent
READERS = [
    *CORE.rglob("*.py"),
    *(CORE.parent / "backends").glob("*/unipar_*/**/*.py"),
    *(CORE.parent / "measure").rglob("*.py"),
]

NAMES = {
    Capabilities: {"able", "capabilities"},
    EngineSpec: {"spec"},
    StepResult: {"done", "result"},
    Placement: {"placement"},
    World: {"world"},
}
"""What each is called where it is read: a field's name alone may be another class's too."""


OFFERED = {EngineSpec: {"named_optimizer"}}
"""For frameworks with optimizers of their own, none of which is here."""


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
    assert public(kind) - read - OFFERED.get(kind, set()) == set()


class LeastOptions(StrategyOptions):
    strategy = "least"


class Least(Strategy):
    """A strategy with nothing that it need not have."""

    name = "least"
    options_type = LeastOptions

    def capabilities(self):
        return Capabilities(frozenset({"fp32"}), frozenset({"cpu"}))

    def prepare(self, spec, world):
        raise NotImplementedError


def test_a_strategy_offers_what_it_has_the_method_for() -> None:
    protocols = (Bidder, CheckpointImporter, CollectiveWatcher, Installable)
    assert not [protocol for protocol in protocols if issubclass(Least, protocol)]
    offered = [protocol for protocol in protocols if issubclass(strategy_class("ddp"), protocol)]
    assert offered == [Bidder]
