"""``pytest --pyargs unipar.testing --strategy NAME``: the strategy trains the same run."""

from __future__ import annotations

from unipar.testing.kit import Measurements
from unipar.testing.pool import WorldPools
from unipar.testing.selection import Proof


def test_conformance(
    conformance_proof: Proof, world_pool: WorldPools, conformance_measurements: Measurements
) -> None:
    """See :mod:`unipar.testing.cases` for what is asked."""
    conformance_proof.run(world_pool, conformance_measurements)
