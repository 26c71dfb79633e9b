"""How often a step under Horovod makes the host wait for the device, by its reads on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from unipar.testing.host_reads import row_of
from unipar.testing.pool import WorldPools

PAGE = Path(__file__).parents[3] / "docs" / "gpu.md"


@pytest.mark.parametrize("strategy", ["horovod"])
def test_the_docs_say_how_often_a_step_reads(world_pool: WorldPools, strategy: str) -> None:
    assert row_of(world_pool(2), strategy) in PAGE.read_text()
