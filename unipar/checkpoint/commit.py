"""Writing a planned checkpoint so that it exists whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from unipar.checkpoint.directory import clean, newest, publish
from unipar.checkpoint.files import FileWriter, as_bytes, digest, on_host, sync_directory
from unipar.checkpoint.manifest import (
    MANIFEST,
    Chunk,
    EngineIndex,
    FileInfo,
    Manifest,
    TensorIndex,
    encode,
)
from unipar.checkpoint.names import GENERATORS, TEMPORARY, rng_path, step_name
from unipar.checkpoint.plan import Item, PartPlan
from unipar.checkpoint.safetensors import Layout
from unipar.errors import CheckpointError
from unipar.state import GroupState, TensorState

Gather = Callable[[Any], list[Any]]
Boxes = Iterator[tuple[Item, torch.Tensor]]


@dataclass(frozen=True)
class EnginePlan:
    """The plan of writing one engine."""

    weights: PartPlan
    optimizer: PartPlan
    groups: tuple[GroupState, ...]
    extra: Mapping[str, Any]
    aliases: Mapping[str, str]


@dataclass(frozen=True)
class Plan:
    """The plan of all ranks' writing.

    Attributes:
        directory: the directory of checkpoints.
        manifest: the manifest, without engines and files.
        engines: by name.
        rank: this rank.
        rng: the state of this rank's random number generators; ``None`` leaves it out.
    """

    directory: Path
    manifest: Manifest
    engines: Mapping[str, EnginePlan]
    rank: int
    rng: Mapping[str, Any] | None

    @property
    def final(self) -> Path:
        return self.directory / step_name(self.manifest.step)

    @property
    def temporary(self) -> Path:
        return self.directory / f"{TEMPORARY}{self.final.name}"

    @property
    def parts(self) -> list[PartPlan]:
        return [
            part for engine in self.engines.values() for part in (engine.weights, engine.optimizer)
        ]


@dataclass
class Outcome:
    """The outcome of one rank's writing.

    Attributes:
        digests: for each part, for each item, of its pieces.
        rng: size and digest of the file of random number generators.
        error: what went wrong first.
    """

    digests: list[list[list[str]]] = field(default_factory=list)
    rng: FileInfo | None = None
    error: str | None = None


def begin(plan: Plan, gather: Gather) -> None:
    """Make the temporary directory. Collective.

    Raises:
        CheckpointError: rank 0 cannot; raised on every rank.
    """
    error = None
    if plan.rank == 0:
        try:
            plan.directory.mkdir(parents=True, exist_ok=True)
            clean(plan.directory)
            plan.temporary.mkdir()
            for folder in {part.folder for part in plan.parts} | {GENERATORS}:
                (plan.temporary / folder).mkdir(parents=True)
        except OSError as failure:
            error = _describe(failure, plan.temporary)
    _raise_first(plan, gather, gather(error))


def stream(part: PartPlan, states: Sequence[TensorState], rank: int, failures: list[str]) -> Boxes:
    """The boxes that this rank writes, as memory on any device, one tensor at a time.

    Every rank reads every tensor, since reading may be collective. A read that fails is put into
    ``failures`` and the rest are read all the same, so that no rank is left waiting in one.
    """
    items = iter(part.ranks[rank].items)
    item = next(items, None)
    for number, state in enumerate(states):
        tensors: Sequence[torch.Tensor] = ()
        try:
            tensors = state.read()
        except Exception as error:
            failures.append(f"cannot read tensor '{state.name}': {error}")
        while item is not None and item.tensor == number:
            if item.held < 0:
                yield item, torch.empty(state.shape, dtype=state.dtype)
            elif tensors:
                yield item, tensors[item.held]
            item = next(items, None)


def write(plan: Plan, parts: Iterable[Boxes], failures: list[str]) -> Outcome:
    """Write this rank's boxes and flush them to the disk. Never raises for what the disk does."""
    outcome = Outcome()
    for part, boxes in zip(plan.parts, parts, strict=True):
        if outcome.error is None:
            try:
                outcome.digests.append(_write_part(plan, part, boxes))
            except (OSError, CheckpointError) as error:
                outcome.error = _describe(error, plan.temporary)
        for _ in boxes:
            pass
        if failures:
            outcome.error = outcome.error or failures[0]
    if outcome.error is None and plan.rng is not None:
        path = plan.temporary / rng_path(plan.rank)
        data = json.dumps(plan.rng).encode()
        try:
            with FileWriter(path, data):
                outcome.rng = FileInfo(len(data), len(data), digest(data))
        except OSError as error:
            outcome.error = _describe(error, path)
    return outcome


def _write_part(plan: Plan, part: PartPlan, boxes: Boxes) -> list[list[str]]:
    own = part.ranks[plan.rank]
    layouts = [own.layout(file) for file in range(len(own.files))]
    digests = []
    with contextlib.ExitStack() as stack:
        writers = []
        for file, layout in enumerate(layouts):
            path = plan.temporary / part.path(plan.rank, file)
            writers.append(stack.enter_context(FileWriter(path, layout.header)))
        for item, tensor in boxes:
            signature = part.tensors[item.tensor]
            if tuple(tensor.shape) != item.box.sizes or tensor.dtype != signature.dtype:
                raise CheckpointError(
                    f"tensor '{signature.name}' was announced as {list(item.box.sizes)} "
                    f"{signature.dtype} and read as {list(tensor.shape)} {tensor.dtype}"
                )
            start = layouts[item.file].starts[item.entry]
            digests.append(writers[item.file].write(as_bytes(on_host(tensor)), start))
            del tensor
    return digests


def finish(plan: Plan, gather: Gather, outcome: Outcome) -> Path:
    """Write the manifest once every rank has written, and give the checkpoint its name. Collective.

    Raises:
        CheckpointError: a rank could not write. Raised on every rank, naming the rank, the file and
            the cause; what was written is removed.
    """
    outcomes = gather(outcome)
    _raise_first(plan, gather, [own.error for own in outcomes])
    error = None
    if plan.rank == 0:
        try:
            _seal(plan, outcomes)
        except (OSError, CheckpointError) as failure:
            error = _describe(failure, plan.temporary)
    _raise_first(plan, gather, gather(error))
    return plan.final


def _seal(plan: Plan, outcomes: Sequence[Outcome]) -> None:
    manifest = assemble(plan, outcomes)
    for name, info in manifest.files.items():
        path = plan.temporary / name
        if path.stat().st_size != info.size:
            raise CheckpointError(f"{path} should have {info.size} bytes")
    with FileWriter(plan.temporary / MANIFEST, encode(manifest)):
        pass
    for folder in {parent for name in manifest.files for parent in Path(name).parents}:
        sync_directory(plan.temporary / folder)
    publish(plan.temporary, plan.final)


def assemble(plan: Plan, outcomes: Sequence[Outcome]) -> Manifest:
    """The manifest of what all ranks have written."""
    files: dict[str, FileInfo] = {}
    indexes: list[dict[str, TensorIndex]] = []
    for number, part in enumerate(plan.parts):
        chunks: list[list[Chunk]] = [[] for _ in part.tensors]
        for rank, own in enumerate(part.ranks):
            layouts: list[Layout] = []
            for file in range(len(own.files)):
                layout = own.layout(file)
                layouts.append(layout)
                files[part.path(rank, file)] = FileInfo(
                    layout.size, len(layout.header), digest(layout.header)
                )
            for item, digests in zip(own.items, outcomes[rank].digests[number], strict=True):
                start = layouts[item.file].starts[item.entry]
                path = part.path(rank, item.file)
                chunks[item.tensor].append(Chunk(item.box, path, start, tuple(digests)))
        indexes.append(
            {
                tensor.name: TensorIndex(tensor.shape, tensor.dtype, tuple(own))
                for tensor, own in zip(part.tensors, chunks, strict=True)
            }
        )
    engines = {
        name: EngineIndex(
            indexes[2 * i], indexes[2 * i + 1], engine.groups, engine.extra, engine.aliases
        )
        for i, (name, engine) in enumerate(plan.engines.items())
    }
    for rank, outcome in enumerate(outcomes):
        if outcome.rng:
            files[rng_path(rank)] = outcome.rng
    return dataclasses.replace(plan.manifest, engines=engines, files=files)


def _raise_first(plan: Plan, gather: Gather, errors: Sequence[str | None]) -> None:
    """Raise on every rank if any rank has an error, once rank 0 has cleared away the remains."""
    failed = [rank for rank, text in enumerate(errors) if text]
    if not failed:
        return
    message = None
    if plan.rank == 0:
        shutil.rmtree(plan.temporary, ignore_errors=True)
        others = f" (ranks {', '.join(map(str, failed[1:]))} failed too)" if failed[1:] else ""
        kept = newest(plan.directory)
        message = (
            f"Could not save step {plan.manifest.step}: rank {failed[0]} failed{others}: "
            f"{errors[failed[0]]}. The training state is as it was; "
            + (f"the newest good checkpoint is {kept}." if kept else "there is no checkpoint yet.")
        )
    raise CheckpointError(gather(message)[0])


def _describe(error: Exception, path: Path) -> str:
    if not isinstance(error, OSError):
        return str(error).rstrip(".")
    where = error.filename or path
    text = f"cannot write {where}: {error.strerror or error}"
    if isinstance(error, FileNotFoundError):
        text += " (the directory must be on a filesystem that all ranks share)"
    return text
