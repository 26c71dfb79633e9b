"""The plan of a save: who writes what and where, the same on every rank."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from unipar.checkpoint.boxes import check_cover, volume, whole
from unipar.checkpoint.files import digest
from unipar.checkpoint.safetensors import SHARDING, Entry, Layout, dtype_name, lay_out
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

    def layout(self, file: int) -> Layout:
        """Lay a file out, so that PyTorch's own distributed checkpoint reader understands it."""
        entries = self.files[file]
        sharding = {
            entry.name: {"saved_offsets": offsets}
            for entry, offsets in zip(entries, self.offsets[file], strict=True)
        }
        metadata = {
            "format": "pt",
            "DCP_VERSION": "1.0",
            SHARDING: json.dumps(sharding, separators=(",", ":")),
        }
        return lay_out(entries, metadata)


@dataclass(frozen=True)
class PartPlan:
    """The writing of an engine's weights, or of its optimizer, by each rank."""

    folder: str
    tensors: tuple[Signature, ...]
    ranks: tuple[RankPlan, ...]

    def path(self, rank: int, file: int) -> str:
        """The path of a rank's file, relative to the checkpoint."""
        return f"{self.folder}/rank-{rank:05d}{f'-{file}' if file else ''}.safetensors"


def plan_part(folder: str, states: Sequence[TensorState], world: World) -> PartPlan:
    """Divide the writing of ``states`` among the ranks, balanced by bytes. Collective.

    Raises:
        CheckpointError: ranks disagree on the tensors, or do not hold each element exactly once
            (replicas apart); raised on every rank.
    """
    tensors = tuple(Signature(state.name, tuple(state.shape), state.dtype) for state in states)
    boxes = [[tuple(box) for box in state.boxes] for state in states]
    # It takes long where many ranks hold many tensors, and mostly they hold what they held before.
    own = digest(repr((tensors, boxes)).encode())
    before, plan = _plans.get(folder, ("", None))
    known = world.gather((own, before))
    now = digest("".join(held for held, _ in known).encode())
    # On every rank or on none: one that has it no more would wait for what others do not send.
    if plan is None or any(before != now for _, before in known):
        plan = _divide(folder, tensors, boxes, world)
        _plans[folder] = now, plan
    return plan


_plans: dict[str, tuple[str, PartPlan]] = {}
"""The last plan of each part, and a digest of what all ranks then held."""


def _divide(
    folder: str, tensors: tuple[Signature, ...], boxes: Sequence[Any], world: World
) -> PartPlan:
    held = world.gather((digest(repr(tensors).encode()), boxes))
    if len({signature for signature, _ in held}) > 1:
        _explain_disagreement(folder, world.gather(tensors))
    ranks = tuple(RankPlan() for _ in held)
    load = [0] * len(held)
    seen: set[str] = set()
    for number, signature in enumerate(tensors):
        if signature.name in seen:
            raise CheckpointError(f"{folder} has two tensors named '{signature.name}'.")
        seen.add(signature.name)
        dtype_name(signature.name, signature.dtype)
        taken: dict[int, int] = defaultdict(int)
        for box, holders in _distinct(signature, [boxes[number] for _, boxes in held]).items():
            nbytes = volume(box) * signature.dtype.itemsize
            owner = min(holders)
            if nbytes > SMALL_BYTES:
                owner = min(holders, key=lambda rank: (load[rank], rank))
            load[owner] += nbytes
            _add(ranks[owner], signature, number, holders[owner], box, taken[owner])
            taken[owner] += 1
    return PartPlan(folder, tensors, ranks)


def _distinct(
    signature: Signature, held: Sequence[Sequence[tuple[tuple[int, ...], tuple[int, ...]]]]
) -> dict[Box, dict[int, int]]:
    """Each box, and where it stands on each rank that holds it."""
    holders: dict[Box, dict[int, int]] = {}
    for rank, boxes in enumerate(held):
        for index, parts in enumerate(boxes):
            box = Box(*parts)
            if volume(box):
                holders.setdefault(box, {}).setdefault(rank, index)
    check_cover(signature.name, signature.shape, list(holders))
    # A tensor without elements still has a name and a shape to keep.
    return holders or {whole(signature.shape): {0: -1}}


def _add(
    plan: RankPlan, signature: Signature, tensor: int, index: int, box: Box, file: int
) -> None:
    # A safetensors file holds a name once, so a rank's second box of a tensor needs a second file.
    if file == len(plan.files):
        plan.files.append([])
        plan.offsets.append([])
    plan.items.append(Item(tensor, index, box, file, len(plan.files[file])))
    plan.files[file].append(Entry(signature.name, signature.dtype, box.sizes))
    plan.offsets[file].append(box.offsets)


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
