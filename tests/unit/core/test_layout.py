"""How the processes of a run are arranged."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from unipar.errors import ConfigError
from unipar.layout import AXES, MESHES, Layout
from unipar.world import Placement, World

MIXED = Layout(dp_replicate=2, dp_shard=3, cp=2, tp=2, pp=2, ep=3)


def test_sizes_of_the_groups() -> None:
    assert MIXED.size == 48
    assert (MIXED.batch, MIXED.fsdp, MIXED.loss, MIXED.efsdp) == (6, 6, 12, 2)


def test_tensor_parallel_ranks_are_neighbors_and_stages_are_apart() -> None:
    layout = Layout(dp_shard=2, tp=2, pp=2)
    places = [
        [layout.coordinate(axis, rank) for axis in ("pp", "dp_shard", "tp")] for rank in range(8)
    ]
    assert places == [[pp, dp, tp] for pp in range(2) for dp in range(2) for tp in range(2)]


def test_another_order_counts_its_last_axis_fastest() -> None:
    layout = Layout(
        dp_replicate=2, tp=2, pp=2, order=("dp_replicate", "dp_shard", "cp", "pp", "tp")
    )
    assert [layout.coordinate("batch", rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [rank for rank in range(8) if layout.leads(rank)] == [2, 6]
    assert layout.ranks() == [0, 1, 4, 5, 2, 3, 6, 7]


def test_every_grid_has_each_rank_once() -> None:
    for axes in MESHES:
        places = Counter(
            tuple(MIXED.coordinate(axis, rank) for axis in axes) for rank in MIXED.ranks()
        )
        assert len(places) == MIXED.size
        assert max(places.values()) == 1
        # A grid is a view of the ranks in their order.
        assert list(places) == sorted(places)


def test_merged_axes_are_runs_of_increasing_ranks() -> None:
    # Process groups sort their ranks, so that places in them are places along the axis.
    for axes in MESHES:
        for axis in axes:
            lines: dict[tuple[int, ...], list[int]] = {}
            for rank in range(MIXED.size):
                others = tuple(MIXED.coordinate(o, rank) for o in axes if o != axis)
                lines.setdefault(others, []).append(MIXED.coordinate(axis, rank))
            size = getattr(MIXED, axis)
            assert all(line == list(range(size)) for line in lines.values()), axis


def test_each_part_of_a_loss_counts_once() -> None:
    leading = [rank for rank in range(MIXED.size) if MIXED.leads(rank)]
    assert len(leading) == MIXED.loss
    assert {MIXED.coordinate("loss", rank) for rank in leading} == set(range(MIXED.loss))
    assert all(MIXED.coordinate("pp", rank) == 1 for rank in leading)


def test_a_world_has_its_place_from_the_layout() -> None:
    layout = Layout(dp_replicate=2, tp=2)
    worlds = [World(Placement(rank=rank, size=4), layout) for rank in range(4)]
    assert [world.data_rank for world in worlds] == [0, 0, 1, 1]
    assert [world.data_size for world in worlds] == [2] * 4
    assert [world.leads for world in worlds] == [True, False, True, False]
    with pytest.raises(AttributeError):
        worlds[0].data_rank = 1  # pyright: ignore[reportAttributeAccessIssue]


def test_a_world_without_a_layout_is_one_of_replicas() -> None:
    world = World(Placement(rank=1, size=3))
    assert (world.data_rank, world.data_size, world.leads) == (1, 3, True)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"tp": 0}, "tp=0.*1 or more"),
        ({"dp_shard": 2, "cp": 3, "ep": 4}, "ep=4.*dp_shard=2 times cp=3.*1, 2, 3 or 6"),
    ],
)
def test_sizes_that_fit_nothing_are_refused(sizes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Layout(**sizes)


@pytest.mark.parametrize(
    ("layout", "size", "says"),
    [
        (Layout(dp_replicate=2, tp=2), 6, "4 processes, and there are 6.*or set dp_replicate to 3"),
        (Layout(dp_shard=4, ep=4), 6, r"Start 4 processes\.$"),
        (Layout(dp_shard=4, ep=2), 6, "set dp_shard to 6"),
        (Layout(pp=2, tp=2), 3, r"pp=2 \* .*tp=2 is of 4 processes, and there are 3. Start 4 p"),
    ],
)
def test_another_number_of_processes_is_refused(layout: Layout, size: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        World(Placement(size=size), layout)


def test_meshes_leave_out_axes_that_divide_nothing() -> None:
    assert Layout(dp_shard=4).grid("fsdp") == ("fsdp",)
    assert Layout(dp_replicate=4).grid("fsdp") == ("dp_replicate", "fsdp")
    assert Layout(dp_shard=2, tp=2).grid("fsdp") == ("fsdp", "tp")
    assert MIXED.grid("ep") == ("pp", "dp_replicate", "efsdp", "ep", "tp")
    assert MIXED.grid("cp") == ("pp", "batch", "cp", "tp")


@pytest.mark.parametrize(
    ("layout", "names", "says"),
    [
        (Layout(dp_shard=4), ("tp",), r"no mesh over 'tp'.*layout\.tp > 1"),
        (MIXED, ("fsdp", "cp"), "fsdp, cp.*pp, dp_replicate, fsdp, tp"),
        (MIXED, ("rows",), "rows"),
    ],
)
def test_meshes_that_are_not_there_are_refused(
    layout: Layout, names: tuple[str, ...], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        layout.grid(*names)


def test_the_axes_multiply_to_the_processes() -> None:
    assert set(AXES) == set(MIXED.order)
