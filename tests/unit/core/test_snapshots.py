"""What modules and other objects hold, compared and put back."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from unipar.engine import snapshots
from unipar.engine.snapshots import Snapshot


@dataclass(frozen=True, slots=True)
class Frozen:
    number: int
    items: list[int]


class Plain:
    def __init__(self) -> None:
        self.number, self.itself = 1.5, self


def model() -> Any:
    made: Any = nn.Sequential(nn.Linear(2, 2))
    made.log = {"seen": [0.5], "counts": Counter("aab"), "order": OrderedDict(a=1, b=2)}
    made[0].meters = [Plain(), Frozen(1, [2])]
    made.queue, made.names = deque([1, 2], maxlen=2), {"a"}
    made.tensor, made.array = torch.zeros(2), np.zeros(2)
    made.logger = logging.getLogger("unipar.test")
    return made


def state_of(made: Any) -> Any:
    first, second = made[0].meters
    return repr([
        made.log, list(made.log["order"]), vars(first).keys(), first.number, second.items,
        made.queue, made.names, made.tensor, made.array, sorted(vars(made)),
    ])  # fmt: skip


def change(made: Any) -> None:
    made.log["seen"].append(0.25)
    made.log["counts"]["a"] += 1
    made.log["order"].pop("a")
    made[0].meters[0].number, made[0].meters[0].other = 2.5, []
    made[0].meters[1].items[0] = 3
    made.queue.append(3)
    made.names.add("b")
    made.tensor += 1
    made.array[0] = 1
    made.later = {"deep": [torch.ones(1)]}
    made.logger.setLevel(logging.DEBUG)


def test_what_was_changed_is_put_back_and_named() -> None:
    made = model()
    state, version = state_of(made), made.tensor._version
    before = Snapshot({"": made})
    change(made)
    changes = before.changes(Snapshot({"": made}, copies=False))
    before.put_back()
    assert state_of(made) == state
    assert made.tensor._version == version + 1, "putting it back is no change to graphs"
    assert set(changes) == {
        "log['seen'][1]", "log['seen'][]", "log['counts']['a']", "log['order']['a']",
        "log['order'][]", "0.meters[0].number", "0.meters[0].other", "0.meters[1].items[0]",
        "queue[0]", "queue[1]", "names['b']", "names[]", "tensor", "array", "later", "later[]",
        "later['deep']", "later['deep'][]", "later['deep'][0]",
    }  # fmt: skip
    assert changes["tensor"].before.tolist() == [0, 0]
    assert changes["tensor"].after.tolist() == [1, 1]
    assert changes["0.meters[0].number"] == (1.5, 2.5)


def test_weights_and_what_is_left_out_are_no_changes() -> None:
    made, given = model(), torch.zeros(2)
    before = Snapshot({"": made, "given": [given]}, apart=(given, "log"))
    with torch.no_grad():
        made[0].weight += 1
        given += 1
    made.eval()
    made.log["seen"].append(1)
    assert not before.changes(Snapshot({"": made, "given": [given]}, apart=(given, "log")))


def test_where_there_are_too_many_objects_it_is_not_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = model()
    assert Snapshot({"": made}).complete
    monkeypatch.setattr(snapshots, "_MOST", 5)
    assert not Snapshot({"": made}).complete
