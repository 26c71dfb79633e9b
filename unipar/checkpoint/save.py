"""Writing a checkpoint: each rank its share, one tensor at a time, complete or not at all."""

from __future__ import annotations

import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import unipar
from unipar.checkpoint.directory import clean, step_name, unfinished
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
from unipar.checkpoint.plan import Item, PartPlan, plan_part
from unipar.checkpoint.rng import capture_rng
from unipar.errors import CheckpointError
from unipar.state import EngineState, TensorState
from unipar.strategy import Engine
from unipar.world import World

Gather = Callable[[Any], list[Any]]


def save(
    directory: str | Path,
    engines: Mapping[str, Engine],
    world: World,
    *,
    step: int,
    progress: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    strategy: str = "",
) -> Path:
    """Write a checkpoint, and return when it is complete and on the disk. Collective.

    Beyond what a rank holds anyway, one tensor at a time is in memory.

    Args:
        directory: takes the checkpoint as ``step-…``.
        engines: by name.
        world: the joined processes.
        step: training steps taken.
        progress: the loop's position, JSON values.
        metrics: metrics at this step.
        strategy: the name of the strategy.

    Raises:
        CheckpointError: a rank could not write, or the state cannot be saved; raised on every
            rank. What was there before is as it was.
    """
    job = _Job(Path(directory), world, step, progress or {}, metrics or {}, strategy)
    job.describe(engines)
    return job.write(world.gather)


class PendingSave:
    """A checkpoint that is being written while training goes on."""

    def __init__(self, job: _Job, gather: Gather) -> None:
        self._path: Path | None = None
        self._error: BaseException | None = None
        # Not a daemon: an interpreter that exits waits until the checkpoint is complete.
        self._thread = threading.Thread(target=self._run, args=(job, gather), name="unipar-save")
        self._thread.start()

    def _run(self, job: _Job, gather: Gather) -> None:
        try:
            self._path = job.write(gather)
        except BaseException as error:
            self._error = error

    def done(self) -> bool:
        """Whether this rank has finished, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """The checkpoint's path, once it is complete.

        Raises:
            CheckpointError: as :func:`save` does.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path


def save_async(
    directory: str | Path,
    engines: Mapping[str, Engine],
    world: World,
    *,
    step: int,
    progress: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    strategy: str = "",
) -> PendingSave:
    """Copy the state to host memory, and write it while training goes on. Collective.

    A rank holds a second copy of what it is to write until that is on the disk. Wait for one save
    before the next is begun. Arguments as for :func:`save`.
    """
    job = _Job(Path(directory), world, step, progress or {}, metrics or {}, strategy)
    job.describe(engines)
    job.snapshot()
    return PendingSave(job, _background_gather(world))


def save_weights(directory: str | Path, engine: Engine, world: World) -> Path:
    """Write a checkpoint of an engine's weights alone; see :func:`save`. Collective."""
    job = _Job(Path(directory), world, engine.num_steps, {}, {}, "", weights_only=True)
    job.describe({engine.spec.name: engine})
    return job.write(world.gather)


def _background_gather(world: World) -> Gather:
    """A gather of its own group: on the default one it would cross with training's collectives."""
    if world.size == 1:
        return world.gather
    group = _background_groups.get(id(world))
    if group is None:
        group = _background_groups[id(world)] = dist.new_group(backend="gloo")

    def gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * world.size
        dist.all_gather_object(values, value, group=group)
        return values

    return gather


_background_groups: dict[int, Any] = {}


@dataclass
class _Part:
    """An engine's weights, or its optimizer's moments, on this rank."""

    plan: PartPlan
    states: Sequence[TensorState]
    copies: list[tuple[Item, torch.Tensor]] | None = None

    def stream(self, rank: int) -> Iterator[tuple[Item, torch.Tensor]]:
        """What this rank writes, in order; reading may be collective, so no tensor is left out."""
        if self.copies is not None:
            yield from self.copies
            return
        wanted: dict[int, list[Item]] = defaultdict(list)
        for item in self.plan.ranks[rank].items:
            wanted[item.tensor].append(item)
        for number, state in enumerate(self.states):
            tensors = state.read()
            for item in wanted[number]:
                empty = torch.empty(item.box.sizes, dtype=state.dtype)
                yield item, empty if item.index < 0 else tensors[item.index]


@dataclass
class _Written:
    """What one rank has written: digests by part and item, and its files."""

    error: str = ""
    digests: list[list[tuple[str, ...]]] = field(default_factory=list)
    files: dict[str, FileInfo] = field(default_factory=dict)
    rng: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Job:
    directory: Path
    world: World
    step: int
    progress: Mapping[str, Any]
    metrics: Mapping[str, float]
    strategy: str
    weights_only: bool = False
    states: dict[str, EngineState] = field(default_factory=dict)
    parts: list[_Part] = field(default_factory=list)
    rng: dict[str, Any] = field(default_factory=dict)

    def describe(self, engines: Mapping[str, Engine]) -> None:
        """Find out what there is to write, and divide it among the ranks."""
        self.rng = {} if self.weights_only else capture_rng()
        for name, engine in engines.items():
            state = engine.export_state()
            if self.weights_only:
                state = EngineState(state.weights, aliases=state.aliases)
            self.states[name] = state
            for kind, tensors in (("weights", state.weights), ("optimizer", state.optimizer)):
                states = list(tensors)
                self.parts.append(_Part(plan_part(f"{name}/{kind}", states, self.world), states))

    def snapshot(self) -> None:
        for part in self.parts:
            part.copies = [
                (item, tensor.detach().to("cpu", copy=True).contiguous())
                for item, tensor in part.stream(self.world.rank)
            ]

    def write(self, gather: Gather) -> Path:
        temporary = unfinished(self.directory, self.step)
        final = self.directory / step_name(self.step)
        try:
            self._all(gather, lambda: self._make(temporary))
            written = gather(self._write_share(temporary))
            self._raise_first([rank.error for rank in written])
            self._all(gather, lambda: self._complete(temporary, final, written))
        except BaseException:
            if self.world.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        return final

    def _all(self, gather: Gather, on_main: Callable[[], None]) -> None:
        """Do something on rank 0, and let every rank know how it went."""
        error = ""
        if self.world.is_main:
            try:
                on_main()
            except OSError as problem:
                error = f"{problem.strerror or problem}: {problem.filename or self.directory}"
            except CheckpointError as problem:
                error = str(problem)
        self._raise_first(gather(error))

    def _raise_first(self, errors: Sequence[str]) -> None:
        for rank, error in enumerate(errors):
            if error:
                raise CheckpointError(
                    f"the checkpoint of step {self.step} could not be written on rank {rank}: "
                    f"{error}. Nothing was kept of it, and earlier checkpoints are as they were. "
                    f"Look at the space and permissions of {self.directory}."
                )

    def _make(self, temporary: Path) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        clean(self.directory)
        for part in self.parts:
            (temporary / part.plan.folder).mkdir(parents=True, exist_ok=True)

    def _write_share(self, temporary: Path) -> _Written:
        written = _Written(rng=self.rng)
        for part in self.parts:
            try:
                written.digests.append(self._write_part(temporary, part, written))
            except OSError as problem:
                written.error = f"{problem.strerror or problem}: {problem.filename or temporary}"
        return written

    def _write_part(self, temporary: Path, part: _Part, written: _Written) -> list[tuple[str, ...]]:
        rank = self.world.rank
        plan = part.plan.ranks[rank]
        layouts = [plan.layout(number) for number in range(len(plan.files))]
        problem: OSError | None = None
        files: list[FileWriter] = []
        digests: list[tuple[str, ...]] = []
        try:
            if not written.error:
                for number, layout in enumerate(layouts):
                    path = part.plan.path(rank, number)
                    files.append(FileWriter(temporary / path, layout.header))
                    header = digest(layout.header)
                    written.files[path] = FileInfo(layout.size, len(layout.header), header)
        except OSError as error:
            problem = error
        for item, tensor in part.stream(rank):
            if problem is not None or written.error:
                continue
            try:
                start = layouts[item.file].starts[item.entry]
                digests.append(tuple(files[item.file].write(as_bytes(on_host(tensor)), start)))
            except OSError as error:
                problem = error
        for file in files:
            try:
                file.close(sync=problem is None)
            except OSError as error:
                problem = problem or error
        if problem is not None:
            raise problem
        return digests

    def _complete(self, temporary: Path, final: Path, written: Sequence[_Written]) -> None:
        manifest = Manifest(
            path=final,
            step=self.step,
            strategy=self.strategy,
            world_size=self.world.size,
            engines=self._index(written),
            files={name: info for rank in written for name, info in rank.files.items()},
            progress={**self.progress, "rng": [rank.rng for rank in written]},
            metrics=self.metrics,
            weights_only=self.weights_only,
            unipar_version=unipar.__version__,
            torch_version=str(torch.__version__),
        )
        data = encode(manifest)
        with FileWriter(temporary / MANIFEST) as file:
            file.write(memoryview(data), 0)
        for folder, _, _ in os.walk(temporary):
            sync_directory(Path(folder))
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        sync_directory(self.directory)

    def _index(self, written: Sequence[_Written]) -> dict[str, EngineIndex]:
        tensors: list[dict[str, TensorIndex]] = []
        for number, part in enumerate(self.parts):
            plan = part.plan
            chunks: dict[int, list[Chunk]] = defaultdict(list)
            for rank, share in enumerate(plan.ranks):
                layouts = [share.layout(file) for file in range(len(share.files))]
                for item, digests in zip(share.items, written[rank].digests[number], strict=True):
                    start = layouts[item.file].starts[item.entry]
                    path = plan.path(rank, item.file)
                    chunks[item.tensor].append(Chunk(item.box, path, start, digests))
            tensors.append(
                {
                    signature.name: TensorIndex(
                        signature.shape, signature.dtype, tuple(chunks[position])
                    )
                    for position, signature in enumerate(plan.tensors)
                }
            )
        return {
            name: EngineIndex(
                weights=tensors[2 * number],
                optimizer=tensors[2 * number + 1],
                groups=state.groups,
                extra=state.extra,
                aliases=state.aliases,
            )
            for number, (name, state) in enumerate(self.states.items())
        }
