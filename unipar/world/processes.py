"""The processes of a run: who this one is, and the few collectives that the core itself needs."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from unipar.layout import Layout
from unipar.world.meeting import meet
from unipar.world.placement import Placement

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Flag(IntEnum):
    """What any rank may ask of all at the next step boundary (see :meth:`World.raise_flag`)."""

    INTERRUPT = 0
    """Stop: a signal came, such as that of Ctrl-C."""
    CHECKPOINT = 1
    """Save, by the clock."""
    SAVE = 2
    """Save, because a signal asks for it."""


class World:
    """The joined processes. At size 1 every method is a no-op that returns its argument.

    Args:
        placement: where this process stands.
        layout: how the processes are arranged; left out: as replicas, one each.

    Raises:
        ConfigError: the layout is one of another number of processes.
    """

    def __init__(
        self, placement: Placement, layout: Layout | None = None, *, owns_group: bool = False
    ) -> None:
        self.placement = placement
        self.layout = Layout(dp_replicate=placement.size) if layout is None else layout
        self.layout.check(placement.size)
        self._data_rank = self.layout.coordinate("batch", placement.rank)
        self._leads = self.layout.leads(placement.rank)
        self._owns_group = owns_group
        self._flags = [0.0] * len(Flag)
        self._agreed = [0.0] * len(Flag)
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._meshes: dict[tuple[str, ...], DeviceMesh] = {}

    @property
    def rank(self) -> int:
        return self.placement.rank

    @property
    def size(self) -> int:
        return self.placement.size

    @property
    def local_rank(self) -> int:
        return self.placement.local_rank

    @property
    def device(self) -> torch.device:
        return self.placement.device

    @property
    def is_main(self) -> bool:
        """Whether this process is rank 0: the one that prints and writes."""
        return self.placement.rank == 0

    @property
    def data_rank(self) -> int:
        """Which share of a global batch this process trains on.

        Processes that hold parts of one model replica have the same.
        """
        return self._data_rank

    @property
    def data_size(self) -> int:
        """How many shares a global batch falls into."""
        return self.layout.batch

    @property
    def leads(self) -> bool:
        """Whether this process has a loss and metrics that count.

        One process of those that hold parts of a model replica does; or, where each holds a part of
        the sequence, one for each part.
        """
        return self._leads

    # -- groups of processes ---------------------------------------------------------------------

    def mesh(self, *axes: str) -> DeviceMesh:
        """The processes along some axes of the layout, in the layout's order. Collective at first.

        Meshes of one grid (see :data:`unipar.layout.MESHES`) are slices of one another, so a
        module may be sharded over several of them. A process group is made when a grid with its
        axis is first asked for; all ranks ask for the same grids in the same order.

        Args:
            axes: ``batch``, ``loss``, ``fsdp``, ``dp_replicate``, ``cp``, ``tp``, ``pp``, ``ep``,
                ``efsdp``. Those of size 1 are not there, but for ``batch``, ``loss``, ``fsdp`` and
                ``efsdp``.

        Raises:
            ConfigError: no grid has these axes together.
        """
        grid = self.layout.grid(*axes)
        if grid not in self._meshes:
            self._meshes[grid] = self._make_mesh(grid)
        return self._meshes[grid][axes]

    def _make_mesh(self, grid: tuple[str, ...]) -> DeviceMesh:
        # Takes as long to import as torch itself, and only some strategies ask for it.
        from torch.distributed.device_mesh import DeviceMesh

        ranks = torch.tensor(self.layout.ranks())
        ranks = ranks.view([getattr(self.layout, axis) for axis in grid])
        for at, axis in enumerate(grid):
            if axis not in self._groups:
                lines = ranks.movedim(at, -1).reshape(-1, ranks.shape[at])
                self._groups[axis] = self._make_group(lines.tolist())
        # Not by DeviceMesh itself, whose groups do not have the run's timeout.
        groups = [self._groups[axis] for axis in grid]
        return DeviceMesh.from_group(groups, self.placement.device_type, ranks, mesh_dim_names=grid)

    def _make_group(self, lines: list[list[int]]) -> dist.ProcessGroup:
        if len(lines) == 1:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        timeout = timedelta(seconds=self.placement.timeout)
        own, _ = dist.new_subgroups_by_enumeration(lines, timeout=timeout)
        assert isinstance(own, dist.ProcessGroup)
        return own

    # -- agreement at a step boundary ------------------------------------------------------------

    def raise_flag(self, flag: Flag) -> None:
        """Ask all ranks for something; safe in a signal handler.

        Ranks get signals, and read clocks, at different moments. A flag raised on one rank is
        carried by the loss reduction of the next step, so all ranks see it at the same boundary.
        """
        self._flags[flag] = 1.0

    def take_flag(self, flag: Flag) -> bool:
        """Whether any rank had raised ``flag`` by the last :meth:`reduce_loss`; clears it."""
        agreed = self._agreed if self.size > 1 else self._flags
        raised = agreed[flag] > 0
        if raised:
            agreed[flag] = self._flags[flag] = 0.0
        return raised

    def start_reduce_loss(
        self, total: torch.Tensor, count: torch.Tensor | float, scale: float = 1.0
    ) -> LossReduction:
        """Begin summing a step's loss total and item count over the ranks that have a part of it.

        Every engine reduces its loss with this once a step, for the flags travel with it. What
        a process gives that does not lead is left out, so the sum is over ``loss``, the ranks along
        ``batch`` and ``cp``.

        Args:
            total: scalar tensor without gradient, this rank's loss.
            count: this rank's number of items.
            scale: what makes a sum over those items of ``total``.
        """
        if self.size == 1:
            return LossReduction(self, total, count, scale)
        # Filled one by one: copying a list to an accelerator would wait for it.
        values = torch.zeros(2 + len(Flag), dtype=torch.float64, device=total.device)
        if self.leads:
            values[0] = total * scale
            values[1] = count
        for flag in Flag:
            if self._flags[flag]:
                values[2 + flag] = self._flags[flag]
        return LossReduction(self, values, None, 1.0, dist.all_reduce(values, async_op=True))

    # -- small collectives on Python values ------------------------------------------------------

    def barrier(self) -> None:
        if self.size > 1:
            # A barrier on the host: the default one would pick the accelerator's backend.
            self.gather(None)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, by rank, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        """Rank 0's ``value`` on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def leave(self) -> None:
        """Give up the process group, if :func:`join` made it."""
        if self._owns_group and dist.is_initialized():
            # Seen with torch 2.13: a gloo thread that drops the last reference to a tensor waits
            # for the GIL, and the group's destructor waits for the thread while holding it; at
            # the interpreter's exit the same thread aborts the process. A moment without the GIL
            # lets the threads finish.
            time.sleep(0.05)
            dist.destroy_process_group()


class LossReduction:
    """A loss on its way to being the mean over all items of the global batch."""

    __slots__ = ("_count", "_scale", "_values", "_work", "_world")

    def __init__(
        self,
        world: World,
        values: torch.Tensor,
        count: torch.Tensor | float | None,
        scale: float,
        work: Any = None,
    ) -> None:
        self._world, self._values, self._work = world, values, work
        self._count, self._scale = count, scale

    def wait(self) -> tuple[float, float]:
        """The mean loss over all items of all ranks, and their number."""
        if self._work is None:
            total = self._values.item() * self._scale
            count = float(self._count)  # pyright: ignore[reportArgumentType]
        else:
            self._work.wait()
            total, count, *agreed = self._values.tolist()
            own = self._world._agreed
            self._world._agreed = [max(a, b) for a, b in zip(own, agreed, strict=True)]
        return (total / count if count else float("nan")), count


def join(
    placement: Placement, layout: Layout | None = None, *, process_group: bool = True
) -> World:
    """Join the run's processes, making the ``torch.distributed`` group unless one exists.

    Args:
        placement: where this process stands.
        layout: how the processes are arranged; left out: as replicas, one each.
        process_group: also make a group when the run has one process (what DDP and FSDP need).
    """
    if placement.device_type == "cuda":
        torch.cuda.set_device(placement.local_rank)
    owns = False
    if (placement.size > 1 or process_group) and not dist.is_initialized():
        # Both backends in one group: gloo carries the core's own values from the host.
        backend = "cpu:gloo,cuda:nccl" if placement.device_type == "cuda" else "gloo"
        timeout = timedelta(seconds=placement.timeout)
        if placement.size == 1:
            dist.init_process_group(
                backend, store=HashStore(), rank=0, world_size=1, timeout=timeout
            )
        else:
            dist.init_process_group(
                backend,
                store=meet(placement),
                rank=placement.rank,
                world_size=placement.size,
                timeout=timeout,
            )
        owns = True
    return World(placement, layout, owns_group=owns)


@contextlib.contextmanager
def joined(placement: Placement, layout: Layout | None = None, *, process_group: bool = True):
    """:func:`join` for the length of a ``with`` block."""
    world = join(placement, layout, process_group=process_group)
    try:
        yield world
    finally:
        world.leave()
