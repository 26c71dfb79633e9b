"""The run of a migrated script, of which a process has one, and its processes."""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from unipar.compat.runconfig import ScriptConfig, file_beside_script, read_config
from unipar.session import Session, find_placement
from unipar.strategy import Engine
from unipar.utils.devices import resolve_device_type
from unipar.world import Placement, World, join


class Prepared(NamedTuple):
    """An engine, and what it is looked up by: its model and its optimizer."""

    engine: Engine
    keys: tuple[Any, ...]


class Run:
    """The state of a run, open or not.

    Attributes:
        session: the open one.
        config: its settings.
        world: its processes, in a default group of ``torch.distributed``.
        file: where the settings stand, if that is not beside the script.
        placement: where :func:`spawn` has put this process.
        engines: one for each model that was prepared.
        begun: by ``id`` of an engine, in which of its steps a loss last came.
        share: this rank's and all ranks' samples of the present batch, where it is cut up.
    """

    def __init__(self) -> None:
        self.session: Session | None = None
        self.config: ScriptConfig | None = None
        self.world: World | None = None
        self.file: Path | None = None
        self.placement: Placement | None = None
        self.engines: list[Prepared] = []
        self.begun: dict[int, int] = {}
        self.share: tuple[int, int] | None = None


current = Run()


# It hides the built-in one, which is used nowhere here.
def open() -> Session:
    """Join the processes under the strategy of ``unipar.yaml``, once. Collective.

    There is a default group of ``torch.distributed`` afterwards, whatever the strategy, so that
    the script's own collectives go on working.

    Raises:
        ConfigError: the settings are wrong, or the strategy cannot run here.
    """
    if current.session is None:
        config = settings()
        session = Session(
            config.strategy,
            precision=config.precision,
            device=config.device,
            timeout=config.timeout,
            on_nan=config.on_nan,
            self_test=config.self_test,
            placement=current.placement,
        )
        with own_randomness():
            session.__enter__()
            current.world = join(session.world.placement)
        current.session, current.config = session, config
        atexit.register(close)
    return current.session


def session() -> Session:
    """The run's session, which this opens unless it is open. Collective the first time."""
    return open()


def close() -> None:
    """End the run, if it is open."""
    if current.session is None:
        return
    session, world = current.session, current.world
    current.session = current.world = current.config = None
    current.engines, current.begun = [], {}
    session.__exit__(None, None, None)
    if world is not None:
        world.leave()


def settings() -> ScriptConfig:
    """Read ``unipar.yaml`` and the environment; defaults where there is no such file.

    Raises:
        ConfigError: every wrong key and value, with file and line.
    """
    return current.config or read_config(current.file or file_beside_script())


def placement() -> Placement:
    """Where this process stands; known before the run is opened."""
    if current.session is not None:
        # Frameworks may have set a launcher's variables since.
        return current.session.world.placement
    config = settings()
    if current.placement is not None:
        return current.placement
    return find_placement(resolve_device_type(config.device), config.timeout)


def device() -> torch.device:
    """This process's device, made the current one if it is a GPU."""
    place = placement()
    if place.device_type == "cuda":
        torch.cuda.set_device(place.local_rank)
    return place.device


def world() -> World:
    """The joined processes. Collective the first time."""
    return open().world


def spawn(fn: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, **_: Any) -> None:
    """``torch.multiprocessing.spawn`` under unipar: ``fn(local_rank, *args)`` in each process.

    Where a launcher has started this process, ``fn`` is called here.

    Raises:
        WorkerError: a process failed.
    """
    from unipar.launchers.spawning import spawn as start

    config = settings()
    file = current.file or file_beside_script()
    run = functools.partial(_spawned, fn, args, file, list(sys.argv))
    start(run, devices=nprocs, device=config.device, timeout=config.timeout)


def _spawned(
    fn: Callable[..., Any], args: tuple[Any, ...], file: Path, argv: list[str], place: Placement
) -> None:
    sys.argv = argv
    current.file, current.placement = file, place
    try:
        fn(place.local_rank, *args)
    finally:
        close()


@contextlib.contextmanager
def own_randomness() -> Iterator[None]:
    """Give torch's generators back as they were."""
    place = device()
    with torch.random.fork_rng([place] if place.type == "cuda" else []):
        yield
