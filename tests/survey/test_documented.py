"""The measured tables tell of the strategies as they are now; run in each environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from measure.frameworks import FRAMEWORKS
from measure.strategies.parity import capabilities
from unipar.strategy import registry

ROOT = Path(__file__).resolve().parents[2]
SURVEY = json.loads((ROOT / "docs" / "backends" / "survey.json").read_text())
MATRIX = json.loads((ROOT / "docs" / "backends" / "matrix.json").read_text())
STRATEGIES = {
    strategy: measured
    for framework in SURVEY["frameworks"].values()
    for strategy, measured in framework["strategies"].items()
}


def here(strategy: str) -> bool:
    return registry.as_mapping(strategy)["name"] in registry.names()


@pytest.mark.parametrize("strategy", filter(here, STRATEGIES))
def test_the_table_has_the_capabilities_of_the_code(strategy: str) -> None:
    documented: dict[str, Any] = STRATEGIES[strategy]["capabilities"]
    assert capabilities(strategy) == documented, "run: make tables"


def test_both_surveys_are_of_the_same_strategies() -> None:
    layouts = {layout for framework in FRAMEWORKS for layout in framework.layouts}
    axes = {axis for framework in FRAMEWORKS for axis in framework.axes}
    resumed = {target["strategy"] for target in MATRIX["targets"]}
    assert resumed - layouts == set(STRATEGIES) - axes
