"""Columns as runs, and divisions in columns, are what they are one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unipar.checkpoint.boxes import check_cover, check_division, intersect
from unipar.checkpoint.division import Chunk, Division, meeting
from unipar.checkpoint.plan import Described, describe, plan_part
from unipar.checkpoint.runs import fault, length, moved, runs_of, value_at, values
from unipar.errors import CheckpointError
from unipar.state import Box, LocalState

columns = st.one_of(
    st.lists(st.integers(0, 2**62)),
    st.lists(st.integers(0, 3), max_size=40),
    st.builds(lambda a, s, n: [a + s * i for i in range(n)], *[st.integers(0, 2**20)] * 2,
              st.integers(1, 200)),
)  # fmt: skip


@given(column=columns)
def test_a_column_is_what_its_runs_say(column: list[int]) -> None:
    runs = runs_of(np.array(column, np.int64))
    assert values(runs).tolist() == column
    assert length(runs) == len(column)
    assert len(runs) <= max(3, 1.5 * len(column) + 3)
    assert [value_at(runs, index) for index in range(len(column))] == column
    assert values(moved(runs, 5)).tolist() == [value + 5 for value in column]
    assert fault(runs, len(column)) is None
    assert fault(runs, len(column) + 1) is not None


def test_what_follows_a_rule_takes_three_numbers() -> None:
    assert runs_of(np.arange(3, 4096, 7)) == (3, 7, 585)
    assert runs_of(np.full(4096, 9)) == (9, 0, 4096)
    assert runs_of(np.array([8] * 4095 + [3])) == (8, 0, 4095, 3, 0, 1)


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and the boxes of a grid over it; or some that are none."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    cuts = [sorted({0, *draw(st.sets(st.integers(0, size - 1), max_size=3))}) for size in shape]
    boxes = [Box((), ())]
    for size, starts in zip(shape, cuts, strict=True):
        pairs = list(zip(starts, [*starts[1:], size], strict=True))
        boxes = [
            Box((*box.offsets, start), (*box.sizes, end - start))
            for box in boxes
            for start, end in pairs
        ]
    boxes = draw(st.permutations(boxes))
    if draw(st.booleans()):
        place = draw(st.integers(0, len(boxes) - 1))
        change = st.tuples(*(st.integers(0, size) for size in shape))
        boxes[place] = Box(draw(change), draw(change))
    return shape, boxes


@given(grid=grids())
@settings(max_examples=300)
def test_a_division_is_refused_in_columns_as_box_by_box(
    grid: tuple[tuple[int, ...], list[Box]],
) -> None:
    shape, boxes = grid

    def told(check: object, *given: object) -> str:
        try:
            check("w", shape, *given)  # pyright: ignore[reportCallIssue]
        except CheckpointError as error:
            return str(error)
        return ""

    offsets, sizes = (np.array([box[side] for box in boxes]) for side in (0, 1))
    assert told(check_division, offsets, sizes) == told(check_cover, boxes)


@given(grid=grids(), data=st.data())
def test_parts_are_found_as_box_by_box(
    grid: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = grid
    paths = [f"{number}.safetensors" for number in range(len(boxes))]
    chunks = [Chunk(box, path, "w") for box, path in zip(boxes, paths, strict=True)]
    offsets, sizes = (
        tuple(runs_of(np.array([box[side][dim] for box in boxes])) for dim in range(len(shape)))
        for side in (0, 1)
    )
    division = Division("w", runs_of(np.arange(len(boxes))), offsets, sizes, paths)
    assert list(division) == chunks
    assert [division[number] for number in range(len(division))] == chunks
    wanted = Box(*(data.draw(st.tuples(*(st.integers(0, n) for n in shape))) for _ in range(2)))
    one_by_one = [chunk for chunk in chunks if intersect(chunk.box, wanted)]
    assert list(meeting(division, wanted)) == one_by_one == list(meeting(chunks, wanted))


class Ranks:
    """A world in which each rank has described what it holds."""

    def __init__(self, states: list[list[LocalState]]) -> None:
        self._states = states

    def gather(self, value: object) -> list[object]:
        if isinstance(value, Described):
            return [describe(own) for own in self._states]
        return [value] * len(self._states)


def planned(boxes: list[list[Box]], shape: tuple[int, ...], tensors: int = 1) -> list[list[Box]]:
    """What each rank writes of tensors that are divided so."""
    import torch

    states = [
        [LocalState(f"w{n}", shape, torch.float32, tuple(own), ()) for n in range(tensors)]
        for own in boxes
    ]
    world: object = Ranks(states)
    part = plan_part(f"test/{np.random.rand()}", states[0], world)  # pyright: ignore[reportArgumentType]
    for rank in range(len(boxes)):
        for item in part.of(rank).items:
            assert boxes[rank][item.held] == item.box
    return [[item.box for item in part.of(rank).items] for rank in range(len(boxes))]


def test_replicas_of_shards_are_shared_out() -> None:
    shards = [Box((0, 0), (500, 400)), Box((500, 0), (500, 400))]
    written = planned([[shards[rank % 2]] for rank in range(8)], (1000, 400), tensors=4)
    assert [len(own) for own in written] == [1] * 8


def test_small_replicas_are_the_lowest_ranks() -> None:
    box = Box((0,), (10,))
    assert planned([[], [box], [box]], (10,)) == [[], [box], []]


def test_several_boxes_of_a_tensor_go_to_several_files(tmp_path: Path) -> None:
    rows = [Box((row, 0), (1, 3)) for row in range(6)]
    assert planned([rows[:1], rows[1:3], rows[3:]], (6, 3)) == [rows[:1], rows[1:3], rows[3:]]


@pytest.mark.parametrize(
    ("boxes", "said"),
    [
        ([[Box((0, 0), (2, 3))], [Box((1, 0), (3, 3))]], "overlap"),
        ([[Box((0, 0), (2, 3))], []], "hold 6 of its 12"),
        ([[Box((0, 0), (2, 3))], [Box((2, 0), (3, 3))]], "has no part"),
        ([[Box((0, 0), (2, 3))], [Box((-2, 0), (2, 3))]], "has no part"),
        ([[], []], "hold 0 of its 12"),
    ],
)
def test_what_is_not_there_once_is_refused(boxes: list[list[Box]], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        planned(boxes, (4, 3))
