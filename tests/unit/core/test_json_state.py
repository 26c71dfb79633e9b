"""State dicts go to JSON and back without loss."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unipar.errors import CheckpointError
from unipar.utils.json_state import check_like, from_json, to_json

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
STATES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.dictionaries(st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


def round_trip(value: Any, like: Any) -> Any:
    return from_json(json.loads(json.dumps(to_json(value, "state"))), like)


@given(state=STATES)
def test_what_is_read_is_what_was_written(state: Any):
    found = round_trip(state, state)
    assert found == state
    assert type(found) is type(state)
    check_like(found, state, "state")


def test_the_state_of_schedulers_comes_back():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 2, 5])
    state = scheduler.state_dict()
    found = round_trip(state, state)
    assert found == state
    assert isinstance(found["milestones"], Counter)


def test_a_scalar_tensor_comes_back_as_one():
    like = {"lr": torch.tensor(0.0, dtype=torch.float64)}
    found = round_trip({"lr": torch.tensor(0.1, dtype=torch.float64)}, like)
    assert torch.equal(found["lr"], torch.tensor(0.1, dtype=torch.float64))


def test_what_would_need_pickle_is_refused_by_name():
    with pytest.raises(CheckpointError, match=r"scheduler.inner.f holds a function, .*without pic"):
        to_json({"inner": {"f": round_trip}}, "scheduler")


@pytest.mark.parametrize(
    ("stored", "named"),
    [
        ({"lr": "low"}, r"group.lr is low in the checkpoint \(text\), and 0.1 \(a number\)"),
        ({"lr": [0.1]}, r"group.lr is \[0.1\]"),
        ({"lr": True}, r"group.lr is True in the checkpoint \(true or false\)"),
        ({"betas": (0.9,)}, r"group.betas is \(0.9,\)"),
        ({"betas": (0.9, "x")}, r"group.betas.1 is x"),
        ({"maximize": 1}, r"group.maximize is 1"),
        (3, r"group is 3"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_name(stored: Any, named: str):
    own = {"lr": 0.1, "betas": (0.9, 0.99), "maximize": False, "foreach": None}
    check_like({"lr": torch.tensor(1e-3), "foreach": True, "more": [1]}, own, "group")
    with pytest.raises(CheckpointError, match=named):
        check_like(stored, own, "group")


def test_a_map_that_is_no_map_is_refused():
    for pairs in (3, [1], [[[1], 2]]):
        with pytest.raises(CheckpointError, match="pairs of key and value"):
            from_json({"__pairs__": pairs})
