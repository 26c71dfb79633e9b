"""The tests of checkpoints that move between strategies: a test module says between which.

PLACES = [Where("single", 1), Where("ddp", 4), Where("fsdp", 2)]

(
    test_resumes_what_its_neighbor_has_saved,
    test_resumes_what_any_other_has_saved,
) = checkpoint_tests(PLACES)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from unipar.strategy import Precision
from unipar.testing.pool import WorldPools
from unipar.testing.portability import Where, assert_goes_on, save_all


class Saved:
    """A checkpoint of half a run from each place, made when it is first asked for."""

    def __init__(self, pools: WorldPools, root: Path) -> None:
        self._pools, self._root = pools, root
        self._paths: dict[tuple[Where, Precision], Path] = {}

    def __getitem__(self, place: Where) -> Path:
        return self.of([place])[place]

    def of(self, places: Iterable[Where], precision: Precision = "fp32") -> dict[Where, Path]:
        """The checkpoint of each place, whose run was of that precision."""
        return {place: self._path(place, precision) for place in places}

    def _path(self, place: Where, precision: Precision) -> Path:
        key = place, precision
        if key not in self._paths:
            root = self._root / str(len(self._paths))
            self._paths[key] = save_all([place], self._pools, root, precision)[place]
        return self._paths[key]


def ring(targets: Sequence[Where], sources: Sequence[Where] = ()) -> list[tuple[Where, Where]]:
    """A pair of source and target for each target, in which the sources come in turn.

    Args:
        targets: where checkpoints are resumed.
        sources: where they are saved; the targets themselves, where none are given.
    """
    sources = sources or targets
    return [(sources[n % len(sources) - 1], target) for n, target in enumerate(targets)]


def checkpoint_tests(
    targets: Sequence[Where], sources: Sequence[Where] = (), precision: Precision = "fp32"
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Two tests: that each target goes on from one source, in a ring, and, thorough, from each.

    Args:
        targets: where checkpoints are resumed.
        sources: where they are saved; the targets themselves, where none are given.
        precision: of all the runs.
    """

    @pytest.mark.slow
    @pytest.mark.parametrize(("source", "target"), ring(targets, sources), ids=str)
    def from_one(
        source: Where, target: Where, saved_checkpoints: Saved, world_pool: WorldPools
    ) -> None:
        saved = saved_checkpoints.of([source], precision)
        assert_goes_on(target, saved, world_pool, precision)

    @pytest.mark.slow
    @pytest.mark.thorough
    @pytest.mark.parametrize("target", targets, ids=str)
    def from_each(target: Where, saved_checkpoints: Saved, world_pool: WorldPools) -> None:
        saved = saved_checkpoints.of(sources or targets, precision)
        assert_goes_on(target, saved, world_pool, precision)

    return from_one, from_each
