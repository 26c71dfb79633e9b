"""``pytest --pyargs unipar.testing --strategy NAME``: the strategy trains the same run."""

from __future__ import annotations

from unipar.testing.kit import Kits
from unipar.testing.selection import Proof


def test_conformance(conformance_proof: Proof, conformance_kits: Kits) -> None:
    """See :mod:`unipar.testing.cases` for what is asked."""
    conformance_proof.run(conformance_kits)
