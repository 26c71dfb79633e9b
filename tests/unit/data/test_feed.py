"""Batches on their way to a device: when each is read and copied, on a device that takes notes.

A GPU's copies are put in its place by ``noting``; what a GPU itself must show is in
``tests/integration/fit/test_feed_on_gpus.py``.
"""

from __future__ import annotations

import collections
import dataclasses
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from unipar import Session
from unipar.data import Loader, on_device
from unipar.data.batch import Batch, MicroBatch
from unipar.data.feed import copies_to, fed
from unipar.data.move import can_be_recorded, pinned
from unipar.data.samples import Pinnable
from unipar.errors import DataError

CPU = torch.device("cpu")


class Notes(list):
    """What happened to which sample, by its first number."""

    def begin(self, data: Any) -> Callable[[], Any]:
        name = int(data.flatten()[0])
        self.append(f"copy {name}")

        def finish() -> Any:
            self.append(f"use {name}")
            return data.clone()

        return finish


@pytest.fixture
def noting(monkeypatch: pytest.MonkeyPatch) -> Notes:
    notes = Notes()
    for module in ("loader", "feed"):
        monkeypatch.setattr(f"unipar.data.{module}.copies_to", lambda device: notes.begin)
    monkeypatch.setattr("unipar.session.copies_to", lambda device: notes.begin)
    return notes


class Told(Dataset):
    """Numbers that are read by code of a user's."""

    def __init__(self, notes: list[str], size: int = 6, broken: int | None = None) -> None:
        self.notes, self.size, self.broken = notes, size, broken

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        self.notes.append(f"read {index}")
        if index == self.broken:
            raise ValueError("torn")
        return torch.tensor([index])


def loader(data: Any, size: int = 1, **settings: Any) -> Loader:
    return Loader(data, global_batch_size=size, shuffle=False, **settings)


def used(batch: Batch) -> list[int]:
    return [int(on_device(part, CPU).flatten()[0]) for part in batch]


def test_each_micro_batch_is_copied_when_the_one_before_it_is_used(noting: Notes):
    given = loader(torch.arange(5), size=2, micro_batch_size=1)
    for batch in given.feed(CPU):
        noting.append(f"step {batch.index}")
        used(batch)
    assert noting == [
        *("copy 0", "step 0", "use 0", "copy 1", "use 1", "copy 2"),
        *("step 1", "use 2", "copy 3", "use 3", "copy 4"),
        *("step 2", "use 4"),
    ]


def test_code_of_the_users_runs_when_it_would_without_a_feed(noting: Notes):
    """So it sees the random numbers, and whatever the step before has changed, that it would."""
    for batch in loader(Told(noting, 3)).feed(CPU):
        noting.append(f"step {batch.index}")
        used(batch)
    assert noting == [
        word for i in range(3) for word in (f"read {i}", f"copy {i}", f"step {i}", f"use {i}")
    ]


@pytest.mark.parametrize(
    ("data", "settings", "early"),
    [
        (torch.arange(3), {}, True),
        (TensorDataset(torch.arange(3)), {}, True),
        ([torch.tensor(i) for i in range(3)], {}, True),
        (torch.utils.data.Subset(TensorDataset(torch.arange(4)), [0, 1, 2]), {}, True),
        (Told([], 3), {}, False),
        (Told([], 3), {"num_workers": 1}, True),
        (DataLoader(torch.arange(3), collate_fn=torch.stack), {}, False),  # pyright: ignore[reportArgumentType]
        (torch.arange(3), {"collate_fn": torch.stack}, False),
    ],
    ids=["tensor", "tensors", "list", "subset", "dataset", "workers", "a DataLoader's", "collates"],
)
def test_what_is_read_early(data: Any, settings: dict[str, Any], early: bool, noting: Notes):
    noting.begin = lambda data: lambda: data  # pyright: ignore[reportAttributeAccessIssue]
    given = loader(data, **settings)
    indexed = given._indexed
    reads: list[int] = []

    def counted() -> Iterator[Any]:
        for found in indexed():
            reads.append(found[0].index)
            yield found

    given._indexed = counted  # pyright: ignore[reportAttributeAccessIssue]
    batches = given.feed(CPU)
    next(batches)
    assert reads == ([0, 1] if early else [0])
    assert given.position.index == 1


def test_no_batch_is_read_beyond_those_that_will_be_used(noting: Notes):
    reads: list[int] = []

    def reading() -> Iterator[Any]:
        for index in range(9):
            reads.append(index)
            yield Batch((MicroBatch(torch.tensor([index]), 1),), 1, index), None

    batches = fed(reading(), CPU, noting.begin, ahead=True, limit=2)  # pyright: ignore[reportArgumentType]
    assert [next(batches)[0].index, next(batches)[0].index] == [0, 1]
    assert reads == [0, 1]
    assert next(batches)[0].index == 2


class Stream(IterableDataset):
    """Numbers, with a place of its own."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.place < 8:
            self.place += 1
            yield torch.tensor([self.place - 1])

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: loader(torch.arange(8), size=2),
        lambda: loader(Told([], 8), size=2, num_workers=1),
        lambda: loader(Stream(), size=2),
        lambda: Loader(torch.arange(8), global_batch_size=2, seed=3),
    ],
    ids=["tensor", "workers", "stream", "shuffled"],
)
def test_order_position_and_what_a_checkpoint_holds_are_those_of_the_loader(
    make: Callable[[], Loader], noting: Notes
):
    plain, feeding = make(), make()
    wanted = [(used(b), b.index, b.epoch, plain.state_dict()) for b in plain]
    found = [(used(b), b.index, b.epoch, feeding.state_dict()) for b in feeding.feed(CPU)]
    assert found == wanted
    assert feeding.state_dict() == plain.state_dict()

    halted = make()
    batches = halted.feed(CPU)
    head = [used(next(batches)), used(next(batches))]
    saved = halted.state_dict()
    resumed = make()
    resumed.load_state_dict(saved)
    assert head + [used(batch) for batch in resumed.feed(CPU)] == [words for words, *_ in wanted]


@pytest.mark.parametrize("settings", [{}, {"num_workers": 1}], ids=["here", "workers"])
def test_an_error_comes_with_the_batch_that_it_belongs_to(settings: Any, noting: Notes):
    given = loader(Told([], broken=2), **settings)
    batches = given.feed(CPU)
    assert [used(next(batches)), used(next(batches))] == [[0], [1]]
    assert given.position.index == 2
    with pytest.raises(DataError, match=r"sample 2 of Told raised ValueError: torn"):
        next(batches)
    assert given.position.index == 2


def test_a_copy_that_cannot_be_made_early_is_made_when_it_is_used(noting: Notes):
    begun: list[int] = []

    def begin(data: Any) -> Callable[[], Any]:
        begun.append(1)
        raise torch.OutOfMemoryError("no room")

    noting.begin = begin  # pyright: ignore[reportAttributeAccessIssue]
    assert [used(batch) for batch in loader(torch.arange(3)).feed(CPU)] == [[0], [1], [2]]
    assert len(begun) == 3


def test_data_that_was_put_in_another_places_is_what_is_used(noting: Notes):
    batch = next(loader(torch.arange(3)).feed(CPU))
    other = dataclasses.replace(batch.microbatches[0], data=torch.tensor([7]))
    assert int(on_device(other, CPU)) == 7


def test_a_micro_batch_that_is_used_twice_is_copied_again(noting: Notes):
    batch = next(loader(torch.arange(3)).feed(CPU))
    assert used(batch) == used(batch) == [0]
    assert noting.count("use 0") == 1


def test_nothing_is_kept_of_what_was_used(noting: Notes):
    data = [torch.full((4,), i) for i in range(5)]
    batches = loader(data).feed(CPU)
    first = next(batches)
    host = weakref.ref(first.microbatches[0].data)
    later = [weakref.ref(next(batches).microbatches[0].data) for _ in range(3)]
    gc.collect()
    assert host() is not None
    # The last is what the feed has just given out.
    assert [ref() is None for ref in later] == [True, True, False]


def test_on_a_cpu_nothing_is_done():
    assert copies_to(CPU) is None
    threads = threading.active_count()
    given = loader(torch.arange(4), size=2)
    for batch in given.feed(CPU):
        assert all(part.copy is None for part in batch)
        assert all(on_device(part, CPU) is part.data for part in batch)
    assert threading.active_count() == threads
    with Session("single", device="cpu") as session:
        batches = [Batch((MicroBatch(torch.zeros(1), 1),), 1)]
        assert next(iter(session.feed(batches))) is batches[0]
        assert [b.index for b in session.feed(session.loader(torch.arange(4), global_batch_size=2))]


def test_a_session_feeds_batches_of_any_iterable(noting: Notes):
    def made() -> Iterator[Batch]:
        for index in range(2):
            noting.append(f"make {index}")
            yield Batch((MicroBatch(torch.tensor([index]), 1),), 1, index)

    with Session("single", device="cpu") as session:
        assert [used(batch) for batch in session.feed(made())] == [[0], [1]]
    assert noting == ["make 0", "copy 0", "use 0", "make 1", "copy 1", "use 1"]


# -- what is copied ------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str = "a"


class Tokens(collections.UserDict):
    """As transformers' BatchEncoding: it moves itself, in place."""

    def to(self, device: torch.device) -> Tokens:
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


class Opaque:
    """Something of which nobody knows what memory it has."""

    def to(self, device: torch.device) -> Opaque:
        return self


BATCHES: dict[str, Any] = {
    "tensor": torch.zeros(2),
    "tuple": (torch.zeros(2), "a"),
    "list": [torch.zeros(2), 1],
    "named tuple": Pair(torch.zeros(2), "a"),
    "dict": {"x": torch.zeros(2), "y": {"z": (torch.zeros(1),)}},
    "dataclass": Frozen(torch.zeros(2)),
    "tokens": Tokens(x=torch.zeros(2)),
}


def kinds(data: Any) -> Any:
    """The containers, and where tensors are the memory they are in."""
    if isinstance(data, torch.Tensor):
        return "pinned" if getattr(data, "was_pinned", False) else "plain"
    if isinstance(data, (dict, collections.UserDict)):
        return type(data), {key: kinds(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return type(data), [kinds(item) for item in data]
    if dataclasses.is_dataclass(data):
        return type(data), kinds(vars(data))
    return data


@pytest.fixture
def pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        other = self.clone()
        other.was_pinned = True  # pyright: ignore[reportAttributeAccessIssue]
        return other

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)


@pytest.mark.usefixtures("pinning")
@pytest.mark.parametrize("kind", BATCHES)
def test_all_tensors_of_a_batch_are_pinned_and_its_kind_stays(kind: str):
    data = BATCHES[kind]
    before = kinds(data)
    # As DataLoaders do, whose own way with tuples and dataclasses is another.
    from torch.utils.data._utils.pin_memory import pin_memory

    for found in (pinned(data), pin_memory([Pinnable(data)])[0].data):
        assert repr(kinds(found)) == repr(before).replace("plain", "pinned")
        assert found is not data
    assert kinds(data) == before
    assert can_be_recorded(data, CPU)


@pytest.mark.usefixtures("pinning")
def test_a_packed_sequence_is_pinned_and_stays_one():
    packed = pack_sequence([torch.zeros(3), torch.zeros(2)])
    assert isinstance(pinned(packed), PackedSequence)
    assert can_be_recorded(packed, CPU)


@pytest.mark.parametrize(
    "data",
    [
        Opaque(),
        {"x": [Opaque()]},
        torch.zeros(2).to_sparse(),
        torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged),
        torch.zeros(2, device="meta"),
    ],
    ids=["opaque", "opaque in containers", "sparse", "nested", "of another device"],
)
def test_what_memory_it_has_must_be_known_for_a_copy_ahead(data: Any):
    assert not can_be_recorded(data, CPU)


def test_what_moves_itself_may_say_that_nothing_waits_for_it():
    asked: list[Any] = []

    class Chooses:
        def to(self, device: torch.device, *, non_blocking: bool = False) -> Chooses:
            asked.append(non_blocking)
            return self

    from unipar.data import move_to

    move_to([Chooses()], torch.device("meta"))
    assert asked == [True]

    # Whoever reads it on the host would not know when it is there.
    move_to([Chooses()], CPU)
    assert asked == [True, False]
