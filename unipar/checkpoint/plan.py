"""The plan of a save: who writes what and where, the same on every rank."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from unipar.checkpoint.boxes import check_cover, check_division, check_inside
from unipar.checkpoint.files import digest, num_pieces
from unipar.checkpoint.runs import Column, Runs, runs_of, values
from unipar.checkpoint.safetensors import (
    CHECKSUMS,
    NO_DIGEST,
    SHARDING,
    Entry,
    Layout,
    dtype_name,
    in_file,
    lay_out,
)
from unipar.errors import CheckpointError
from unipar.state import Box, TensorState
from unipar.world import World

SMALL_BYTES = 64 << 10
"""Replicas up to this size are written by the lowest rank that holds them: balancing gains nothing,
and statistics that ranks keep for themselves (BatchNorm's) come from one rank, as DDP has it."""


class Signature(NamedTuple):
    """The facts of a tensor on which all ranks must agree."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Item(NamedTuple):
    """A box that a rank writes.

    Attributes:
        tensor: the tensor's position in its part.
        held: the box's position among the rank's boxes of that tensor; -1 for an empty tensor.
        box: the box itself.
        file: the position of its file among the rank's files of the part.
        entry: the box's position in that file.
    """

    tensor: int
    held: int
    box: Box
    file: int
    entry: int


@dataclass
class RankPlan:
    """One rank's writing of a part: items in the order of the tensors, each file's entries."""

    items: list[Item] = field(default_factory=list)
    files: list[list[Entry]] = field(default_factory=list)
    offsets: list[list[tuple[int, ...]]] = field(default_factory=list)

    _layouts: dict[int, Layout] = field(default_factory=dict, compare=False, repr=False)

    def layout(self, file: int) -> Layout:
        """Lay a file out, so that PyTorch's own distributed checkpoint reader understands it.

        The header has room for the digests of the data, by :meth:`header`.
        """
        if file not in self._layouts:
            self._layouts[file] = self._lay_out(file)
        return self._layouts[file]

    def _lay_out(self, file: int) -> Layout:
        entries = self.files[file]
        sharding = {
            entry.name: {"saved_offsets": offsets}
            for entry, offsets in zip(entries, self.offsets[file], strict=True)
        }
        pieces = sum(num_pieces(entry.nbytes) for entry in entries)
        # Strings have their quotes escaped, so that the digests are where this key is, and only
        # there: whatever the tensors are called.
        metadata = {
            CHECKSUMS: NO_DIGEST * pieces,
            "format": "pt",
            "DCP_VERSION": "1.0",
            SHARDING: json.dumps(sharding, separators=(",", ":")),
        }
        return lay_out(entries, metadata)

    def header(self, file: int, digests: Sequence[Sequence[str]]) -> bytes:
        """The first bytes of a file whose data are known.

        Args:
            file: which one.
            digests: of each entry's pieces.
        """
        blank = self.layout(file).header
        order = in_file([entry.dtype for entry in self.files[file]])
        told = "".join(one for own in order for one in digests[own]).encode()
        key = f'"{CHECKSUMS}":"'.encode()
        start = blank.index(key) + len(key)
        return blank[:start] + told + blank[start + len(told) :]

    def add(self, signature: Signature, tensor: int, held: int, box: Box, file: int) -> None:
        """Add a box as the next item."""
        # A safetensors file holds a name once, so a second box of a tensor needs a second file.
        if file == len(self.files):
            self.files.append([])
            self.offsets.append([])
        self.items.append(Item(tensor, held, box, file, len(self.files[file])))
        self.files[file].append(Entry(signature.name, signature.dtype, box.sizes))
        self.offsets[file].append(box.offsets)


class Written(NamedTuple):
    """The boxes of a tensor that are written, by rank, in columns.

    Attributes:
        ranks: which rank writes each.
        held: as :attr:`Item.held`.
        files: the position of its file in :attr:`PartPlan.files`.
        offsets: for each dim, where it begins.
        sizes: for each dim, how long it is.
    """

    ranks: Runs
    held: Runs
    files: Runs
    offsets: tuple[Runs, ...]
    sizes: tuple[Runs, ...]


@dataclass(frozen=True)
class PartPlan:
    """The writing of an engine's weights, or of its optimizer, by each rank.

    Attributes:
        folder: where its files are, relative to the checkpoint.
        tensors: what is written, in its order.
        written: the boxes of each tensor.
        files: whose they are: a rank, and a position among that rank's.
    """

    folder: str
    tensors: tuple[Signature, ...]
    written: tuple[Written, ...]
    files: tuple[tuple[int, int], ...]
    _of: dict[int, RankPlan] = field(default_factory=dict, compare=False, repr=False)

    def of(self, rank: int) -> RankPlan:
        """The plan of one rank."""
        if rank not in self._of:
            self._of[rank] = self._plan(rank)
        return self._of[rank]

    def _plan(self, rank: int) -> RankPlan:
        found = RankPlan()
        for number, (signature, written) in enumerate(zip(self.tensors, self.written, strict=True)):
            own = np.flatnonzero(values(written.ranks) == rank)
            if not len(own):
                continue
            held = values(written.held)[own].tolist()
            boxes = zip(_taken(written.offsets, own), _taken(written.sizes, own), strict=True)
            for file, (index, (offsets, sizes)) in enumerate(zip(held, boxes, strict=True)):
                found.add(signature, number, index, Box(offsets, sizes), file)
        return found

    def path(self, rank: int, file: int) -> str:
        """The path of a rank's file, relative to the checkpoint."""
        return f"{self.folder}/rank-{rank:05d}{f'-{file}' if file else ''}.safetensors"

    @property
    def paths(self) -> list[str]:
        """The paths of all files."""
        return [self.path(rank, file) for rank, file in self.files]


def _taken(dims: Sequence[Runs], own: Column) -> list[tuple[int, ...]]:
    columns = [values(runs)[own].tolist() for runs in dims]
    return list(zip(*columns, strict=True)) if columns else [()] * len(own)


class Described(NamedTuple):
    """What a rank tells of the tensors that it holds.

    Attributes:
        signatures: a digest of their names, shapes and dtypes.
        boxes: which parts it holds, packed.
        fault: what is wrong with one of these.
    """

    signatures: str
    boxes: bytes = b""
    fault: str | None = None


def describe(states: Sequence[TensorState]) -> Described:
    """Describe what a rank holds, for the others.

    Parts repeat themselves from layer to layer, so that they pack into a hundredth.
    """
    told = digest(repr(_signatures(states)).encode())
    try:
        for state in states:
            check_inside(state.name, state.shape, state.boxes)
    except CheckpointError as error:
        return Described(told, fault=str(error))
    counts = [len(state.boxes) for state in states]
    numbers = [n for state in states for box in state.boxes for side in box for n in side]
    packed = zlib.compress(np.array(counts + numbers, np.int64).tobytes(), 1)
    return Described(told, packed)


def _signatures(states: Sequence[TensorState]) -> tuple[Signature, ...]:
    return tuple(Signature(state.name, tuple(state.shape), state.dtype) for state in states)


def plan_part(folder: str, states: Sequence[TensorState], world: World) -> PartPlan:
    """Divide the writing of ``states`` among the ranks, balanced by bytes. Collective.

    Raises:
        CheckpointError: ranks disagree on the tensors, or do not hold each element exactly once
            (replicas apart); raised on every rank.
    """
    told = describe(states)
    # It takes long where many ranks hold many tensors, and mostly they hold what they held before.
    own = digest(repr(told).encode())
    before, plan = _plans.get(folder, ("", None))
    known = world.gather((own, before))
    now = digest("".join(held for held, _ in known).encode())
    # On every rank or on none: one that has it no more would wait for what others do not send.
    if plan is None or any(before != now for _, before in known):
        plan = _agreed(folder, _signatures(states), told, world)
        _plans[folder] = now, plan
    return plan


_plans: dict[str, tuple[str, PartPlan]] = {}
"""The last plan of each part, and a digest of what all ranks then held."""


def _agreed(folder: str, tensors: tuple[Signature, ...], own: Described, world: World) -> PartPlan:
    held = world.gather(own)
    if len({one.signatures for one in held}) > 1:
        _explain_disagreement(folder, world.gather(tensors))
    if fault := next((one.fault for one in held if one.fault), None):
        raise CheckpointError(fault)
    seen: set[str] = set()
    for signature in tensors:
        if signature.name in seen:
            raise CheckpointError(f"{folder} has two tensors named '{signature.name}'.")
        seen.add(signature.name)
        dtype_name(signature.name, signature.dtype)
    return _divide(folder, tensors, [one.boxes for one in held])


class _Held(NamedTuple):
    """Boxes of a tensor on all ranks, by rank: ``(boxes,)``, and ``(boxes, dims)``."""

    ranks: Column
    held: Column
    offsets: Column
    sizes: Column

    def only(self, chosen: Column) -> _Held:
        return _Held(*(column[chosen] for column in self))


def _divide(folder: str, tensors: tuple[Signature, ...], packed: Sequence[bytes]) -> PartPlan:
    load = np.zeros(len(packed), np.int64)
    chosen: list[_Held] = []
    for signature, held in zip(tensors, _by_tensor(tensors, packed), strict=True):
        own, nbytes = _owned(signature, held, load)
        np.add.at(load, own.ranks, nbytes)
        chosen.append(own)
    return PartPlan(folder, tensors, *_numbered(chosen, len(packed)))


def _by_tensor(tensors: Sequence[Signature], packed: Sequence[bytes]) -> Iterator[_Held]:
    """The boxes of all ranks, tensor by tensor."""
    num, ranks = len(tensors), len(packed)
    counts = np.empty((ranks, num), np.int64)
    unpacked = bytearray()
    for row, one in zip(counts, packed, strict=True):
        told = zlib.decompress(one)
        row[:] = np.frombuffer(told, np.int64, num)
        unpacked += memoryview(told)[8 * num :]
    numbers = np.frombuffer(unpacked, np.int64)
    # Rank by rank until here: each box's tensor, rank, place among the rank's, and first number.
    dims = np.array([len(signature.shape) for signature in tensors], np.int64)
    flat = counts.reshape(-1)
    boxes = int(flat.sum())
    tensor = np.repeat(np.tile(np.arange(num, dtype=np.int32), ranks), flat)
    rank = np.repeat(np.arange(ranks, dtype=np.int32), counts.sum(axis=1))
    held = (np.arange(boxes) - np.repeat(np.cumsum(flat) - flat, flat)).astype(np.int32)
    widths = 2 * dims[tensor]
    first = np.cumsum(widths) - widths
    order = np.argsort(tensor, kind="stable")
    ends = np.cumsum(counts.sum(axis=0))
    for number, end in enumerate(ends.tolist()):
        own = order[end - int(counts[:, number].sum()) : end]
        size = int(dims[number])
        both = numbers[first[own][:, None] + np.arange(2 * size)]
        yield _Held(
            rank[own].astype(np.int64), held[own].astype(np.int64), both[:, :size], both[:, size:]
        )


def _owned(signature: Signature, held: _Held, load: Column) -> tuple[_Held, Column]:
    """Each box once, on the rank that writes it; and its bytes.

    Of replicas the rank writes that has the least to write so far; small ones the lowest.
    """
    held = held.only(np.flatnonzero(held.sizes.all(axis=1)))
    if not len(held.ranks):
        check_cover(signature.name, signature.shape, [])
        # A tensor without elements still has a name and a shape to keep.
        shape = np.array([signature.shape], np.int64).reshape(1, -1)
        none = np.zeros(1, np.int64)
        return _Held(none, none - 1, np.zeros_like(shape), shape), none
    nbytes = held.sizes.prod(axis=1) * signature.dtype.itemsize
    sides = np.concatenate([held.offsets, held.sizes], axis=1)
    differing = [column for column in sides.T if (column != column[0]).any()]
    # Stable, so that what is equal stays in the order of the ranks.
    order = np.lexsort((np.where(nbytes > SMALL_BYTES, load[held.ranks], 0), *differing))
    first = np.zeros(len(order), bool)
    first[0] = True
    for column in differing:
        first[1:] |= np.diff(column[order]) != 0
    own = np.sort(order[first])
    held = held.only(own)
    check_division(signature.name, signature.shape, held.offsets, held.sizes)
    return held, nbytes[own]


def _numbered(
    chosen: Sequence[_Held], ranks: int
) -> tuple[tuple[Written, ...], tuple[tuple[int, int], ...]]:
    """The same with the files that they go to, which are numbered rank by rank."""
    # A safetensors file holds a name once, so a second box of a tensor needs a second file.
    files = [_repeats(held.ranks) for held in chosen]
    most = 1 + max((int(own.max()) for own in files), default=-1)
    used = np.zeros((most, ranks), bool)
    for held, own in zip(chosen, files, strict=True):
        used[own, held.ranks] = True
    numbers = np.cumsum(used.reshape(-1)).reshape(used.shape) - 1
    written = tuple(
        Written(
            runs_of(held.ranks),
            runs_of(held.held),
            runs_of(numbers[own, held.ranks]),
            tuple(map(runs_of, held.offsets.T)),
            tuple(map(runs_of, held.sizes.T)),
        )
        for held, own in zip(chosen, files, strict=True)
    )
    return written, tuple((rank, file) for file, rank in np.argwhere(used).tolist())


def _repeats(ranks: Column) -> Column:
    """How many of the same rank stand before each, where those of a rank stand together."""
    begins = np.flatnonzero(np.diff(ranks, prepend=-1))
    return np.arange(len(ranks)) - np.repeat(begins, np.diff(begins, append=len(ranks)))


def _explain_disagreement(folder: str, tensors: Sequence[Sequence[Signature]]) -> None:
    for rank, theirs in enumerate(tensors):
        for ours, other in zip(tensors[0], theirs, strict=False):
            if ours != other:
                raise CheckpointError(
                    f"{folder}: ranks describe different tensors: rank 0 has {_show(ours)} where "
                    f"rank {rank} has {_show(other)}."
                )
        if len(theirs) != len(tensors[0]):
            raise CheckpointError(
                f"{folder}: rank 0 describes {len(tensors[0])} tensors and rank {rank} "
                f"{len(theirs)}."
            )


def _show(signature: Signature) -> str:
    return f"'{signature.name}' {list(signature.shape)} {signature.dtype}"
