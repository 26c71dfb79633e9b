"""Which ranks of a run see the same directory, and waiting for what only some ranks do."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from unipar.checkpoint.load import agree
from unipar.world import World


@dataclass(frozen=True)
class Disks:
    """The disks that a directory lies on, one for all hosts or one for each.

    Attributes:
        writers: for each rank, the lowest rank that sees the same directory.
        leaders: the lowest rank of each host.
    """

    writers: tuple[int, ...]
    leaders: tuple[int, ...]

    @property
    def shared(self) -> bool:
        """Whether all ranks see the same directory."""
        return len(set(self.writers)) == 1


def find_disks(directory: Path, world: World) -> Disks:
    """Make a directory on every host, and see which hosts have it in common. Collective.

    Raises:
        CheckpointError: it cannot be written somewhere; raised on every rank.
    """
    nodes = world.gather(world.placement.node_rank)
    leader = {node: nodes.index(node) for node in nodes}
    leaders = tuple(sorted(leader.values()))
    if len(leaders) == 1:
        return Disks((0,) * world.size, leaders)
    token, error = f".disk-{uuid.uuid4().hex}", None
    if world.rank in leaders:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / token).touch()
        except OSError as failure:
            error = f"{directory} cannot be written: {failure.strerror}."
    agree(world, error)
    tokens = world.gather(token)
    seen = [rank for rank in leaders if (directory / tokens[rank]).exists()]
    lowest = world.gather(min(seen, default=world.rank))
    # Not before all have looked.
    (directory / token).unlink(missing_ok=True)
    return Disks(tuple(lowest[leader[node]] for node in nodes), leaders)


def together(world: World, act: Callable[[], object] | None) -> None:
    """Wait until every rank has done what it alone has to do, however long it takes. Collective.

    A collective that the others would wait in has the run's timeout.

    Args:
        world: the run's processes.
        act: this rank's part; ``None`` where it has none.

    Raises:
        CheckpointError: of the first rank whose part failed; raised on every rank.
    """
    errors: list[str] = []

    def run() -> None:
        try:
            assert act is not None
            act()
        except Exception as error:
            errors.append(str(error) or repr(error))

    thread = None
    if act is not None:
        thread = threading.Thread(target=run, name="unipar-copy", daemon=True)
        thread.start()
    while True:
        if thread is not None:
            thread.join(1.0)
        if not any(world.gather(thread is not None and thread.is_alive())):
            break
    agree(world, errors[0] if errors else None)
