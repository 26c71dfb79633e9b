"""Whatever division of tensors is saved, any other can be loaded."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unipar.checkpoint import load, save, verify
from unipar.checkpoint.boxes import check_cover, intersect, is_run, volume
from unipar.errors import CheckpointError
from unipar.state import Box

Division = list[list[Box]]


@st.composite
def divisions(draw: st.DrawFn, shape: tuple[int, ...]) -> Division:
    """Boxes that cover a shape, dealt out to 1 to 4 ranks, some to several of them."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dims = [dim for dim, size in enumerate(box.sizes) if size > 1]
        if not dims:
            boxes.append(box)
            continue
        dim = draw(st.sampled_from(dims))
        at = draw(st.integers(1, box.sizes[dim] - 1))
        for start, size in ((0, at), (at, box.sizes[dim] - at)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[dim] += start
            sizes[dim] = size
            boxes.append(Box(tuple(offsets), tuple(sizes)))
    ranks: Division = [[] for _ in range(draw(st.integers(1, 4)))]
    for box in boxes:
        for rank in draw(st.sets(st.integers(0, len(ranks) - 1), min_size=1)):
            ranks[rank].append(box)
    return ranks


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Division, Division]:
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
    return shape, draw(divisions(shape)), draw(divisions(shape))


@given(case=cases(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.bool]))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_division_is_loaded_from_any_other(
    make_engine: Callable[..., Any],
    ranks: Callable[..., list[Any]],
    case: tuple[tuple[int, ...], Division, Division],
    dtype: torch.dtype,
) -> None:
    shape, saved, wanted = case
    full = torch.randn(shape).to(dtype)
    with tempfile.TemporaryDirectory() as directory:
        paths = ranks(
            len(saved),
            lambda world: save(
                directory,
                {"m": make_engine({"w": full}, boxes={"w": saved[world.rank]})},
                world,
                step=1,
            ),
        )
        assert len(set(paths)) == 1, paths
        verify(paths[0])

        def load_part(world: Any) -> torch.Tensor:
            target = torch.zeros_like(full)
            engine = make_engine({"w": target}, boxes={"w": wanted[world.rank]})
            load(paths[0], {"m": engine}, world)
            return target

        for rank, target in enumerate(ranks(len(wanted), load_part)):
            for box in wanted[rank]:
                part = tuple(slice(o, o + n) for o, n in zip(*box, strict=True))
                assert torch.equal(target[part], full[part])


@given(case=cases())
def test_parts_of_a_division_share_nothing_and_leave_nothing_out(
    case: tuple[tuple[int, ...], Division, Division],
) -> None:
    shape, division, other = case
    boxes = list({box for rank in division for box in rank})
    check_cover("w", shape, boxes)
    for box in {box for rank in other for box in rank}:
        shared = [part for own in boxes if (part := intersect(own, box))]
        assert sum(map(volume, shared)) == volume(box)


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([Box((0, 0), (2, 4)), Box((1, 0), (3, 4))], "overlap"),
        ([Box((0, 0), (2, 4))], "the ranks hold 8 of its 16 elements"),
        ([Box((0, 0), (5, 4))], r"of shape \(4, 4\) has no part"),
        ([Box((0,), (4,))], r"of shape \(4, 4\) has no part"),
    ],
)
def test_a_division_with_holes_or_overlaps_is_refused(boxes: list[Box], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        check_cover("w", (4, 4), boxes)


def test_holes_are_refused_on_every_rank_before_anything_is_written(
    tmp_path: Any, make_engine: Callable[..., Any], ranks: Callable[..., list[Any]]
) -> None:
    full = torch.randn(4, 2)

    def save_rows(world: Any) -> Any:
        engine = make_engine({"w": full}, boxes={"w": [Box((world.rank, 0), (1, 2))]})
        return save(tmp_path, {"m": engine}, world, step=1)

    errors = ranks(2, save_rows)
    assert all("the ranks hold 4 of its 8 elements" in str(error) for error in errors)
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_describe_different_tensors_are_told_apart(
    tmp_path: Any, make_engine: Callable[..., Any], ranks: Callable[..., list[Any]]
) -> None:
    def save_own(world: Any) -> Any:
        return save(tmp_path, {"m": make_engine({f"w{world.rank}": torch.ones(2)})}, world, step=1)

    for error in ranks(2, save_own):
        assert "rank 0 has 'w0' [2] torch.float32 where rank 1 has 'w1'" in str(error)


@pytest.mark.parametrize(
    ("sizes", "within", "run"),
    [
        ((2, 4), (3, 4), True),
        ((2, 3), (3, 4), False),
        ((1, 3), (3, 4), True),
        ((1, 2, 4), (5, 3, 4), True),
        ((2, 2, 4), (5, 3, 4), False),
        ((), (), True),
    ],
)
def test_unbroken_runs(sizes: tuple[int, ...], within: tuple[int, ...], run: bool) -> None:
    assert is_run(sizes, within) is run


def test_replicas_are_written_once_and_shared_out_by_bytes(
    tmp_path: Any, make_engine: Callable[..., Any], ranks: Callable[..., list[Any]]
) -> None:
    weights = {f"w{i}": torch.randn(100, 400) for i in range(8)}
    (path, _) = ranks(2, lambda world: save(tmp_path, {"m": make_engine(weights)}, world, step=1))
    sizes = [file.stat().st_size for file in sorted((path / "m/weights").iterdir())]
    total = sum(weight.nbytes for weight in weights.values())
    assert len(sizes) == 2
    assert sum(sizes) == pytest.approx(total, rel=0.01)
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)


def test_large_tensors_are_read_in_pieces_and_sliced_along_any_dim(
    tmp_path: Any, make_engine: Callable[..., Any], ranks: Callable[..., list[Any]]
) -> None:
    full = torch.randn(900, 700)  # about 2.4 MiB: three pieces with a checksum each
    columns = [Box((0, 0), (900, 300)), Box((0, 300), (900, 400))]
    rows = [Box((0, 0), (333, 700)), Box((333, 0), (567, 700))]

    def save_columns(world: Any) -> Any:
        engine = make_engine({"w": full}, boxes={"w": [columns[world.rank]]})
        return save(tmp_path, {"m": engine}, world, step=1)

    path = ranks(2, save_columns)[0]

    def load_rows(world: Any) -> torch.Tensor:
        target = torch.zeros_like(full)
        load(path, {"m": make_engine({"w": target}, boxes={"w": [rows[world.rank]]})}, world)
        return target

    first, second = ranks(2, load_rows)
    assert torch.equal(first + second, full)
