"""Consecutive elements of a tensor, described as boxes."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from unipar.engine import flat_state


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_boxes_hold_the_elements_that_were_given_and_no_others(
    shape: list[int], data: st.DataObject
) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    whole = torch.arange(size)
    state = flat_state("weight", tuple(shape), start, whole[start:stop])
    found = torch.full((size,), -1).view(shape)
    for box, part in zip(state.boxes, state.tensors, strict=True):
        where = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        assert (found[where] == -1).all()
        found[where] = part
    expected = torch.where((whole >= start) & (whole < stop), whole, -1)
    assert torch.equal(found.flatten(), expected)
    assert len(state.boxes) <= max(1, 2 * len(shape) - 1)


def test_boxes_are_views_of_what_was_given() -> None:
    held = torch.zeros(5)
    state = flat_state("weight", (3, 3), 2, held)
    for tensor in state.tensors:
        tensor.fill_(1.0)
    assert held.tolist() == [1.0] * 5
