"""What fails between hosts is named, survived or resumed from: a part of the survey."""

from __future__ import annotations

import pytest

from measure.reliability.faults import Case, measure, undisturbed
from measure.reliability.network import missing

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]
CASES = [
    Case("cut", "ddp", "ranks", 3),
    Case("loss", "ddp", "ranks", 2),
    Case("frozen", "ddp", "fit", 2),
    Case("clocks", "ddp", "ranks", 2),
    Case("store", "ddp", "ranks", 2),
    Case("directory", "ddp", "fit", 2),
    Case("reboot", "ddp", "torchrun", 2),
    Case("loads", "ddp", "ranks", 2),
]


@pytest.fixture(scope="module")
def losses() -> dict[int, float]:
    return undisturbed("ddp")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fault)
def test_fault(case: Case, losses: dict[int, float]) -> None:
    found = measure(case, losses)
    assert found["right"], found["problem"]
    assert found["left"] == 0
