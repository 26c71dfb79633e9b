"""Saving: now, or in the background while training goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from unipar.checkpoint import rng
from unipar.checkpoint.commit import (
    EnginePlan,
    Gather,
    Plan,
    begin,
    finish,
    stream,
    write,
)
from unipar.checkpoint.copies import HostCopies, lacking_room
from unipar.checkpoint.manifest import Manifest
from unipar.checkpoint.plan import Item, plan_part
from unipar.checkpoint.training import class_names
from unipar.errors import CheckpointError, ConfigError
from unipar.state import EngineState, TensorState
from unipar.strategy import Engine
from unipar.utils.urls import is_url
from unipar.utils.version import __version__
from unipar.world import World

logger = logging.getLogger(__name__)


def save(
    directory: str | Path,
    engines: Mapping[str, Engine],
    world: World,
    *,
    step: int,
    progress: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    strategy: str = "",
    disks: Sequence[int] = (),
) -> Path:
    """Write ``directory/step-…``. Collective.

    Each rank writes what it holds, replicas once; no rank copies more than one tensor at a time.
    The checkpoint appears under its name once it is whole and on the disk; one of the same step is
    replaced.

    Args:
        directory: the directory of checkpoints, on a filesystem that all ranks share unless
            ``disks`` says otherwise.
        engines: by name; the same names in the same order on every rank.
        world: the run's processes.
        step: training steps taken.
        progress: the loop's position, JSON values. ``seed`` is what ranks are reseeded from when
            their number changes.
        metrics: metrics at this step.
        strategy: the name of the strategy, for the record.
        disks: for each rank, the lowest rank that sees the same directory. On each disk there is
            then a part of the checkpoint: the manifest, and the files of the ranks that see it.

    Returns:
        the checkpoint's path.

    Raises:
        CheckpointError: it could not be written. Raised on every rank; the training state and
            earlier checkpoints are as they were.
    """
    wait_for_pending()
    states = _export(engines)
    manifest = _manifest(directory, world, step, progress, metrics, strategy)
    plan, tensors = _plan(manifest, states, world, rng.capture(), disks)
    return _now(plan, tensors, world)


def save_weights(directory: str | Path, engine: Engine, world: World) -> Path:
    """Write a checkpoint of one engine's weights alone, as :func:`save` does. Collective."""
    wait_for_pending()
    state = engine.export_state()
    states = {engine.spec.name: EngineState(state.weights, aliases=state.aliases)}
    manifest = _manifest(directory, world, engine.num_steps, None, None, "", weights_only=True)
    return save_states(manifest, states, world, None)


def save_async(
    directory: str | Path,
    engines: Mapping[str, Engine],
    world: World,
    *,
    step: int,
    progress: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    strategy: str = "",
    disks: Sequence[int] = (),
    copies: HostCopies | None = None,
    then: Callable[[Path], object] | None = None,
) -> PendingSave:
    """As :func:`save`, but training may go on while the files are written. Collective.

    What this rank will write is first copied to host memory, so a rank needs room for its share of
    the state once more. A save that is still under way is waited for.

    Args:
        copies: memory for the copies, kept by the caller from save to save; left out: new memory
            for this save.
        then: called with the checkpoint's path once it is complete, in the thread that wrote it;
            the next save waits for it.

    Raises:
        CheckpointError: the directory cannot be made, or ranks disagree on the tensors. What goes
            wrong later is raised by :meth:`PendingSave.wait`.
    """
    wait_for_pending()
    states = _export(engines)
    manifest = _manifest(directory, world, step, progress, metrics, strategy)
    plan, tensors = _plan(manifest, states, world, rng.capture(), disks)
    return _in_background(plan, tensors, world, copies or HostCopies(), then)


def save_where_room(
    directory: str | Path,
    engines: Mapping[str, Engine],
    world: World,
    *,
    step: int,
    progress: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    strategy: str = "",
    disks: Sequence[int] = (),
    copies: HostCopies,
    then: Callable[[Path], object] | None = None,
) -> tuple[PendingSave | Path, str | None]:
    """As :func:`save_async` where every host has room, else as :func:`save`. Collective.

    Returns:
        the save that is under way, or the path of the checkpoint that was written because there is
        no room; and then why.

    Raises:
        CheckpointError: as either.
    """
    wait_for_pending()
    states = _export(engines)
    manifest = _manifest(directory, world, step, progress, metrics, strategy)
    plan, tensors = _plan(manifest, states, world, rng.capture(), disks)
    own = [part.of(world.rank) for part in plan.parts]
    short = lacking_room(copies.lacking(own, pinned=world.device.type == "cuda"), world)
    if short is None:
        return _in_background(plan, tensors, world, copies, then), None
    path = _now(plan, tensors, world)
    if then is not None:
        then(path)
    return path, short


def _in_background(
    plan: Plan,
    tensors: list[list[TensorState]],
    world: World,
    copies: HostCopies,
    then: Callable[[Path], object] | None,
) -> PendingSave:
    global _pending
    gather = _own_gather(world)
    begin(plan, world.gather)
    failures: list[str] = []
    snapshot = copies.take(
        [
            stream(part, own, world.rank, failures)
            for part, own in zip(plan.parts, tensors, strict=True)
        ],
        failures,
    )
    _pending = PendingSave(plan, snapshot, copies, failures, gather, then)
    return _pending


def _now(plan: Plan, tensors: list[list[TensorState]], world: World) -> Path:
    begin(plan, world.gather)
    failures: list[str] = []
    boxes = (
        stream(part, own, world.rank, failures)
        for part, own in zip(plan.parts, tensors, strict=True)
    )
    return finish(plan, world.gather, write(plan, boxes, failures))


class PendingSave:
    """A checkpoint that is being written in the background. The process does not exit before it."""

    def __init__(
        self,
        plan: Plan,
        snapshot: list[list[tuple[Item, torch.Tensor]]],
        copies: HostCopies,
        failures: list[str],
        gather: Gather,
        then: Callable[[Path], object] | None,
    ) -> None:
        self.step = plan.manifest.step
        self._plan, self._then = plan, then
        self._error: Exception | None = None
        self._ended = threading.Event()
        # Not a daemon: the interpreter waits for it before it exits.
        self._thread = threading.Thread(
            target=self._run,
            args=(snapshot, copies, failures, gather),
            name=f"unipar-save-{self.step}",
            daemon=False,
        )
        self._thread.start()

    def _run(
        self,
        snapshot: list[list[tuple[Item, torch.Tensor]]],
        copies: HostCopies,
        failures: list[str],
        gather: Gather,
    ) -> None:
        try:
            copies.wait()
            outcome = write(self._plan, map(iter, snapshot), failures)
            finish(self._plan, gather, outcome)
        except Exception as error:
            self._error = error
            logger.error("The checkpoint of step %d failed: %s", self.step, error)
        self._ended.set()
        if self._then is not None and self._error is None:
            self._then(self._plan.final)

    def done(self) -> bool:
        """Return whether it has ended on this rank, well or not."""
        return self._ended.is_set()

    def wait(self) -> Path:
        """Wait until it has ended, and return the checkpoint's path.

        Raises:
            CheckpointError: it could not be written; see :func:`save`.
        """
        self._ended.wait()
        if isinstance(self._error, CheckpointError):
            raise self._error
        if self._error:
            raise CheckpointError(
                f"Could not save step {self.step}: {self._error}"
            ) from self._error
        return self._plan.final


_pending: PendingSave | None = None
_group: tuple[Any, Any] | None = None


def wait_for_pending() -> None:
    """Wait until no save is under way in the background; do so before leaving a process group."""
    if _pending:
        _pending._thread.join()


def save_states(
    manifest: Manifest,
    states: Mapping[str, EngineState],
    world: World,
    generators: Mapping[str, Any] | None,
) -> Path:
    """Write described states to ``manifest.path/step-…``. Collective; see :func:`save`."""
    plan, tensors = _plan(manifest, states, world, generators)
    return _now(plan, tensors, world)


def _export(engines: Mapping[str, Engine]) -> dict[str, EngineState]:
    states = {name: engine.export_state() for name, engine in engines.items()}
    for name, engine in engines.items():
        states[name].extra |= class_names(engine)
    return states


def _manifest(
    directory: str | Path,
    world: World,
    step: int,
    progress: Mapping[str, Any] | None,
    metrics: Mapping[str, float] | None,
    strategy: str,
    *,
    weights_only: bool = False,
) -> Manifest:
    if is_url(directory):
        raise ConfigError(
            f"a checkpoint is written to a local directory, and {directory} is a URL. fit copies "
            "checkpoints to URLs (checkpoint='s3://…'); in a loop of your own copy them yourself."
        )
    return Manifest(
        path=Path(directory).absolute(),
        step=step,
        strategy=strategy,
        world_size=world.size,
        engines={},
        files={},
        progress={**(progress or {}), **_streams(world)},
        metrics=metrics or {},
        weights_only=weights_only,
        unipar_version=__version__,
        torch_version=str(torch.__version__),
    )


def _streams(world: World) -> dict[str, list[int]]:
    """Which ranks draw the same random numbers; left out where no two do."""
    streams = [world.layout.stream(rank) for rank in range(world.size)]
    return {} if streams == list(range(world.size)) else {"streams": streams}


def _plan(
    manifest: Manifest,
    states: Mapping[str, EngineState],
    world: World,
    generators: Mapping[str, Any] | None,
    disks: Sequence[int] = (),
) -> tuple[Plan, list[list[TensorState]]]:
    plans: dict[str, EnginePlan] = {}
    tensors: list[list[TensorState]] = []
    for name, state in states.items():
        if not name or "/" in name or name.startswith(".") or name == "rng":
            raise ConfigError(f"An engine cannot be named '{name}', for a folder is named so.")
        weights, optimizer = list(state.weights), list(state.optimizer)
        tensors += [weights, optimizer]
        plans[name] = EnginePlan(
            plan_part(f"{name}/weights", weights, world),
            plan_part(f"{name}/optimizer", optimizer, world),
            state.groups,
            state.extra,
            state.aliases,
        )
    plan = Plan(manifest.path, manifest, plans, world.rank, generators, tuple(disks))
    return plan, tensors


def _own_gather(world: World) -> Gather:
    """A gather over a group of its own: training uses the default one at the same time."""
    global _group
    if world.size == 1:
        return world.gather
    if _group is None or _group[0] is not dist.group.WORLD:
        timeout = timedelta(seconds=world.placement.timeout)
        _group = (dist.group.WORLD, dist.new_group(backend="gloo", timeout=timeout))
    group = _group[1]

    def gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * world.size
        try:
            dist.all_gather_object(values, value, group=group)
        except RuntimeError as error:
            raise CheckpointError(
                "Another rank ended, or did not answer, while the checkpoint was being written; it "
                "may be incomplete, which loading it will tell."
            ) from error
        return values

    return gather
