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
from unipar.checkpoint.division import Division
from unipar.checkpoint.files import FileWriter, as_bytes, digest, on_host, sync_directory
from unipar.checkpoint.manifest import (
    MANIFEST,
    EngineIndex,
    FileInfo,
    Manifest,
    TensorIndex,
    encode,
)
from unipar.checkpoint.names import GENERATORS, TEMPORARY, rng_path, step_name
from unipar.checkpoint.plan import Item, PartPlan
from unipar.checkpoint.runs import moved
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
        disks: for each rank, the lowest rank that sees the same directory; empty where all do.
    """

    directory: Path
    manifest: Manifest
    engines: Mapping[str, EnginePlan]
    rank: int
    rng: Mapping[str, Any] | None
    disks: tuple[int, ...] = ()

    @property
    def leads(self) -> bool:
        """Whether this rank makes and names directories, for all that see the same."""
        return self.rank == (self.disks[self.rank] if self.disks else 0)

    def is_here(self, rank: int) -> bool:
        """Return whether what ``rank`` writes is seen by this rank."""
        return not self.disks or self.disks[rank] == self.disks[self.rank]

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
        files: what was written, by path; of all that is in them, only the digests of headers.
        error: what went wrong first.
    """

    files: dict[str, FileInfo] = field(default_factory=dict)
    error: str | None = None


def begin(plan: Plan, gather: Gather) -> None:
    """Make the temporary directory, on each disk. Collective.

    Raises:
        CheckpointError: a rank cannot that is to; raised on every rank.
    """
    error = None
    if plan.leads:
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
    items = iter(part.of(rank).items)
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
                outcome.files.update(_write_part(plan, part, boxes))
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
                outcome.files[rng_path(plan.rank)] = FileInfo(len(data), len(data), digest(data))
        except OSError as error:
            outcome.error = _describe(error, path)
    return outcome


def _write_part(plan: Plan, part: PartPlan, boxes: Boxes) -> dict[str, FileInfo]:
    own = part.of(plan.rank)
    layouts = [own.layout(file) for file in range(len(own.files))]
    digests: list[list[list[str]]] = [[] for _ in layouts]
    files: dict[str, FileInfo] = {}
    with contextlib.ExitStack() as stack:
        writers = []
        for file in range(len(layouts)):
            path = plan.temporary / part.path(plan.rank, file)
            writers.append(stack.enter_context(FileWriter(path)))
        for item, tensor in boxes:
            signature = part.tensors[item.tensor]
            if tuple(tensor.shape) != item.box.sizes or tensor.dtype != signature.dtype:
                raise CheckpointError(
                    f"tensor '{signature.name}' was announced as {list(item.box.sizes)} "
                    f"{signature.dtype} and read as {list(tensor.shape)} {tensor.dtype}"
                )
            start = layouts[item.file].starts[item.entry]
            digests[item.file].append(writers[item.file].write(as_bytes(on_host(tensor)), start))
            del tensor
        for file, writer in enumerate(writers):
            header = own.header(file, digests[file])
            writer.begin_with(header)
            info = FileInfo(layouts[file].size, len(header), digest(header))
            files[part.path(plan.rank, file)] = info
    return files


def finish(plan: Plan, gather: Gather, outcome: Outcome) -> Path:
    """Write the manifest once every rank has written, and give the checkpoint its name. Collective.

    Raises:
        CheckpointError: a rank could not write. Raised on every rank, naming the rank, the file and
            the cause; what was written is removed.
    """
    outcomes = gather(outcome)
    _raise_first(plan, gather, [own.error for own in outcomes])
    error = None
    if plan.leads:
        try:
            _seal(plan, outcomes)
        except (OSError, CheckpointError) as failure:
            error = _describe(failure, plan.temporary)
    _raise_first(plan, gather, gather(error))
    return plan.final


def _seal(plan: Plan, outcomes: Sequence[Outcome]) -> None:
    manifest = assemble(plan, outcomes)
    for name, info in _here(plan, manifest).items():
        path = plan.temporary / name
        if path.stat().st_size != info.size:
            raise CheckpointError(f"{path} should have {info.size} bytes")
    with FileWriter(plan.temporary / MANIFEST, encode(manifest)):
        pass
    for folder in {parent for name in manifest.files for parent in Path(name).parents}:
        sync_directory(plan.temporary / folder)
    publish(plan.temporary, plan.final)


def _here(plan: Plan, manifest: Manifest) -> dict[str, FileInfo]:
    """Those files of the checkpoint that this rank sees."""
    away = {
        part.path(rank, file)
        for part in plan.parts
        for rank, file in part.files
        if not plan.is_here(rank)
    } | {rng_path(rank) for rank in range(manifest.world_size) if not plan.is_here(rank)}
    return {name: info for name, info in manifest.files.items() if name not in away}


def assemble(plan: Plan, outcomes: Sequence[Outcome]) -> Manifest:
    """The manifest of what all ranks have written."""
    written = {path: info for outcome in outcomes for path, info in outcome.files.items()}
    files: dict[str, FileInfo] = {}
    for path in (path for part in plan.parts for path in part.paths):
        files[path] = written.pop(path)
    paths = list(files)
    indexes: list[dict[str, TensorIndex]] = []
    first = 0
    for part in plan.parts:
        tensors: dict[str, TensorIndex] = {}
        for (name, shape, dtype), own in zip(part.tensors, part.written, strict=True):
            division = Division(name, moved(own.files, first), own.offsets, own.sizes, paths)
            tensors[name] = TensorIndex(shape, dtype, division)
        indexes.append(tensors)
        first += len(part.files)
    engines = {
        name: EngineIndex(
            indexes[2 * i], indexes[2 * i + 1], engine.groups, engine.extra, engine.aliases
        )
        for i, (name, engine) in enumerate(plan.engines.items())
    }
    # What is left are random generators.
    return dataclasses.replace(plan.manifest, engines=engines, files={**files, **written})


def _raise_first(plan: Plan, gather: Gather, errors: Sequence[str | None]) -> None:
    """Raise on every rank if any rank has an error, once the remains are cleared away."""
    failed = [rank for rank, text in enumerate(errors) if text]
    if not failed:
        return
    message = None
    if plan.leads:
        shutil.rmtree(plan.temporary, ignore_errors=True)
    if plan.rank == 0:
        others = f" (ranks {', '.join(map(str, failed[1:]))} failed too)" if failed[1:] else ""
        kept = newest(plan.directory)
        message = (
            f"Could not save step {plan.manifest.step}: rank {failed[0]} failed{others}: "
            f"{errors[failed[0]]}. The training state is as it was; "
            + (f"the newest good checkpoint is {kept}." if kept else "there is no checkpoint yet.")
        )
    error = CheckpointError(gather(message)[0])
    error.agreed = True
    raise error


def _describe(error: Exception, path: Path) -> str:
    if not isinstance(error, OSError):
        return str(error).rstrip(".")
    where = error.filename or path
    text = f"cannot write {where}: {error.strerror or error}"
    if isinstance(error, FileNotFoundError):
        text += " (the directory must be on a filesystem that all ranks share)"
    return text
