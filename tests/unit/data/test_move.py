"""A batch moves to a device whole, and is not touched when it is there already."""

from __future__ import annotations

import collections
import collections.abc
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from unipar.data import move_to

CPU, META = torch.device("cpu"), torch.device("meta")


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    kept: int = dataclasses.field(default=3, init=False)


class Movable:
    """As a tokenizer's batch: knows how to move."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Movable:
        return self if self.x.device == device else Movable(self.x.to(device))


def tensor() -> torch.Tensor:
    return torch.zeros(2)


BATCHES: dict[str, Any] = {
    "tensor": tensor(),
    "list": [tensor(), 1],
    "tuple": (tensor(), "a"),
    "named tuple": Pair(tensor(), "a"),
    "dict": {"x": tensor(), "y": {"z": [tensor()]}},
    "ordered dict": collections.OrderedDict(x=tensor()),
    "user dict": collections.UserDict(x=tensor()),
    "default dict": collections.defaultdict(list, x=tensor()),
    "dataclass": Frozen(tensor()),
    "movable": Movable(tensor()),
    "plain": ["a", 1, None, b"x"],
}


def devices_in(data: Any) -> set[str]:
    """Where the tensors in ``data`` are, found without :func:`move_to`'s own walk."""
    found: set[str] = set()
    todo = [data]
    while todo:
        item = todo.pop()
        if isinstance(item, torch.Tensor):
            found.add(item.device.type)
        elif isinstance(item, collections.abc.Mapping):
            todo.extend(item.values())
        elif isinstance(item, (list, tuple)):
            todo.extend(item)
        elif hasattr(item, "__dict__"):
            todo.extend(vars(item).values())
    return found


@pytest.mark.parametrize("kind", BATCHES)
def test_what_is_there_already_is_the_same_object(kind: str):
    assert move_to(BATCHES[kind], CPU) is BATCHES[kind]


@pytest.mark.parametrize("kind", [kind for kind in BATCHES if kind != "plain"])
def test_every_tensor_moves_and_the_original_stays(kind: str):
    moved = move_to(BATCHES[kind], META)
    assert type(moved) is type(BATCHES[kind])
    assert devices_in(moved) == {"meta"}
    assert devices_in(BATCHES[kind]) == {"cpu"}


def test_what_has_no_tensor_never_moves():
    assert move_to(BATCHES["plain"], META) is BATCHES["plain"]


def test_a_copy_keeps_what_is_no_tensor():
    assert move_to(BATCHES["named tuple"], META).name == "a"
    assert move_to(BATCHES["dataclass"], META).kept == 3
    assert move_to(BATCHES["default dict"], META).default_factory is list


def test_a_packed_sequence_moves_as_it_wants_to():
    moved = move_to(pack_sequence([torch.zeros(3), torch.zeros(2)]), META)
    assert moved.data.device == META
    assert moved.batch_sizes.device == CPU
