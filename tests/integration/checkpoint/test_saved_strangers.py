"""Whatever is edited in a checkpoint is refused by name, or was of no account."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from measure.fuzzing.fuzz import TESTED, Tally, attempt, bounded, check_valid, fuzz
from measure.fuzzing.readers import READERS, Reader

NAMES = [name for name in READERS if name != "deepspeed"]
MEMORY_MB = 256


@pytest.fixture(params=NAMES, scope="module")
def reader(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Reader]:
    made = READERS[request.param](tmp_path_factory.mktemp(request.param))
    check_valid(made)
    yield made
    made.close()


@settings(
    max_examples=300,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(random=st.randoms(use_true_random=True))
def test_edits_are_refused_or_change_nothing(reader: Reader, random: Random) -> None:
    tally = Tally()
    with bounded():
        attempt(reader, random, tally)
    assert not tally.worst, next(iter(tally.worst.values()))


@pytest.mark.thorough
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NAMES)
def test_many_edits_are_refused_or_change_nothing(name: str, tmp_path: Path) -> None:
    made = READERS[name](tmp_path)
    try:
        tally = fuzz(made, TESTED, seed=1)
    finally:
        made.close()
    assert not tally.worst, "\n".join(tally.worst.values())
    assert tally.counts["refused"] > TESTED / 4
    assert tally.peak_mb < MEMORY_MB
