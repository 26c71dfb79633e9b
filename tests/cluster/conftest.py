"""Clusters that are started on this machine; ``make test-cluster`` runs what needs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Called with the items of other directories too.
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A Slurm of two nodes."""
    if lacking := missing():
        pytest.skip(lacking)
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
