"""The processes of a run: who this one is, and the few collectives that the core itself needs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from unipar.errors import ConfigError
from unipar.layout import Layout
from unipar.utils.host_copy import HostCopy, to_device
from unipar.utils.torch_versions import forget_meshes
from unipar.world.meeting import meet
from unipar.world.placement import Placement

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_PLACES = 2**16
"""Steps are told apart modulo this, so that sums of squares are exact."""
FINGERPRINTS = 2**16
"""Fingerprints are below this, likewise."""


class Flag(IntEnum):
    """A request of any rank to all at the next step boundary (see :meth:`World.raise_flag`)."""

    INTERRUPT = 0
    """Stop: a signal came, such as that of Ctrl-C."""
    CHECKPOINT = 1
    """Save, by the clock."""
    SAVE = 2
    """Save, because a signal asks for it."""
    TIMES = 3
    """Compare the times that ranks take, by the clock."""
    SAVED = 4
    """A checkpoint that was written in the background is complete."""
    HANDOVER = 5
    """Hand the run over to another number of ranks."""
    SPEEDS = 6
    """Measure how fast ranks are, by the clock."""


class World:
    """The joined processes. At size 1 every method is a no-op that returns its argument.

    Args:
        placement: where this process stands.
        layout: how the processes are arranged; left out: as replicas, one each.

    Attributes:
        reduced_at: when this process last began to reduce a loss, by ``time.perf_counter``.

    Raises:
        ConfigError: the layout is one of another number of processes.
    """

    def __init__(
        self, placement: Placement, layout: Layout | None = None, *, owns_group: bool = False
    ) -> None:
        # Each step asks for these.
        self.placement, self.size, self.device = placement, placement.size, placement.device
        self.layout = Layout(dp_replicate=placement.size) if layout is None else layout
        self.layout.check(placement.size)
        self._data_rank = self.layout.coordinate("batch", placement.rank)
        self._leads = self.layout.leads(placement.rank)
        self._owns_group = owns_group
        self._flags = [0.0] * len(Flag)
        self._agreed = [0.0] * len(Flag)
        self._step = self._given_up = 0
        self.reduced_at = 0.0
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._meshes: dict[tuple[str, ...], DeviceMesh] = {}

    @property
    def rank(self) -> int:
        return self.placement.rank

    @property
    def local_rank(self) -> int:
        return self.placement.local_rank

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

        if not self._meshes:
            forget_meshes()
        ranks = torch.tensor(self.layout.ranks(), device="cpu")
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
        """Return whether a rank had raised ``flag`` by the last :meth:`reduce_loss`; clear it."""
        agreed = self._agreed if self.size > 1 else self._flags
        raised = agreed[flag] > 0
        if raised:
            agreed[flag] = self._flags[flag] = 0.0
        return raised

    def lower_flag(self, flag: Flag) -> None:
        """Take back a flag that this rank alone has raised, since the last reduction began."""
        self._flags[flag] = 0.0

    def start_reduce_loss(
        self,
        total: torch.Tensor,
        count: torch.Tensor | float,
        scale: float = 1.0,
        fingerprint: int = 0,
    ) -> LossReduction:
        """Begin summing a step's loss total and item count over the ranks that have a part of it.

        Every engine reduces its loss with this once a step, for the flags travel with it, and so
        does the number of steps, by which ranks that are in different ones are found. What a
        process gives that does not lead is left out, so the sum is over ``loss``, the ranks along
        ``batch`` and ``cp``.

        Args:
            total: scalar tensor without gradient, this rank's loss.
            count: this rank's number of items.
            scale: what makes a sum over those items of ``total``.
            fingerprint: of what should be the same on every rank, at least 0 and below
                :data:`FINGERPRINTS`; see :attr:`LossReduction.alike`.
        """
        if isinstance(count, torch.Tensor) and count.device != total.device:
            # It is on the host, where its value is at hand.
            count = float(count)
        if self.size == 1:
            return LossReduction(self, total, count, scale)
        self.reduced_at = time.perf_counter()
        self._step += 1
        place = self._step % _PLACES
        counted = count if self.leads and not isinstance(count, torch.Tensor) else 0.0
        known = [0.0, counted, place, place**2, fingerprint, fingerprint**2, *self._flags]
        # Not on what a user's script has made torch's default device.
        values = torch.tensor(known, dtype=torch.float64, device="cpu")
        values = to_device(values, total.device)
        if self.leads:
            values[0] = total if scale == 1 else total * scale
            if isinstance(count, torch.Tensor):
                values[1] = count
        return LossReduction(self, values, None, 1.0, dist.all_reduce(values, async_op=True))

    def give_up_step(self) -> None:
        """Note that this rank gives up a step.

        All ranks do, or none: a rank that alone goes on with its next batch would have its loss and
        its gradients added to those of the others' last one. That is refused when the next losses
        have been reduced, before an optimizer steps.
        """
        self._step += 1
        self._given_up += 1

    def reopen_step(self) -> None:
        """Have the next loss be reduced as one of the same step.

        A rank that has gone on to its next step meanwhile is found, as in :meth:`give_up_step`.
        """
        self._step -= 1

    def forget_steps(self) -> None:
        """Count steps from here, where all ranks stand alike. Collective."""
        self._step = self._given_up = 0

    def _are_equal(self, total: float, squares: float) -> bool:
        """Whether all ranks have given the same whole number.

        Args:
            total: the sum of what they have given.
            squares: the sum of the squares, which equal numbers alone make the least it can be.
        """
        return self.size * int(squares) == int(total) ** 2

    def _check_places(self, places: float, squares: float) -> None:
        """Refuse a sum over ranks that are in different steps.

        Args:
            places: the sum of their places.
            squares: the sum of the squares.
        """
        if self._are_equal(places, squares):
            return
        steps = self.gather((self._step, self._given_up))
        told = ", ".join(
            f"rank {rank} in its step {step}"
            + (f" ({given_up} of them given up)" if given_up else "")
            for rank, (step, given_up) in enumerate(steps)
        )
        raise ConfigError(
            f"the ranks are in different steps, counted over all engines of the session: {told}. "
            "Nothing was updated by this one. A step is given up on every rank or on none; else "
            "gradients of different batches would be added up. Let an error that one rank meets "
            "end the run, or have all ranks decide together, by world.gather(failed), before they "
            "call engine.zero_grad() or go on. What one rank alone puts through the model belongs "
            "under torch.no_grad()."
        )

    # -- small collectives on Python values ------------------------------------------------------

    def barrier(self) -> None:
        if self.size > 1:
            # A barrier on the host: the default one would pick the accelerator's backend.
            self.gather(None)

    def gather(self, value: Any, axis: str | None = None) -> list[Any]:
        """Every rank's ``value``, by rank, on every rank; or on those along one of :meth:`mesh`."""
        if self.size == 1:
            return [value]
        group = None if axis is None else self.mesh(axis).get_group()
        values: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(values, value, group=group)
        return values

    def start_gather(self, values: torch.Tensor) -> Gathering:
        """Begin to send every rank's tensor to rank 0. Nobody waits. Collective.

        Args:
            values: in host memory; of one shape and dtype on all ranks.
        """
        if self.size == 1:
            return Gathering(values[None])
        rows = values.new_empty((self.size, *values.shape)) if self.is_main else None
        into = None if rows is None else list(rows.unbind())
        return Gathering(rows, dist.gather(values, into, async_op=True))

    def broadcast(self, value: Any) -> Any:
        """Rank 0's ``value`` on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def on(self, placement: Placement) -> World:
        """The same processes, which compute on another device from now on. Collective.

        Args:
            placement: where this one stands, with the other type of device.

        Raises:
            ConfigError: two ranks have the same GPU.
        """
        torch.cuda.set_device(placement.device)
        with _refusing_shared_gpus(placement):
            dist.all_reduce(torch.zeros((), device=placement.device))
        world = World(placement, self.layout, owns_group=self._owns_group)
        self._owns_group = False
        forget_meshes(self._meshes.values())
        return world

    def leave(self) -> None:
        """Give up the process group, if :func:`join` made it."""
        forget_meshes(self._meshes.values())
        if self._owns_group and dist.is_initialized():
            # Seen with torch 2.13: a gloo thread that drops the last reference to a tensor waits
            # for the GIL, and the group's destructor waits for the thread while holding it; at
            # the interpreter's exit the same thread aborts the process. A moment without the GIL
            # lets the threads finish.
            time.sleep(0.05)
            dist.destroy_process_group()


class Gathering:
    """Tensors of all ranks on their way to rank 0."""

    __slots__ = ("_rows", "_work")

    def __init__(self, rows: torch.Tensor | None, work: Any = None) -> None:
        self._rows, self._work = rows, work

    def done(self) -> bool:
        """Whether this rank has no more to wait for."""
        return self._work is None or self._work.is_completed()

    def read(self) -> torch.Tensor | None:
        """Rank 0's tensor, one row for each rank; ``None`` on the others."""
        if self._work is not None:
            self._work.wait()
        return self._rows


class LossReduction:
    """A loss on its way to being the mean over all items of the global batch, and to the host.

    Attributes:
        alike: whether every rank has given the same fingerprint; known after :meth:`wait`.
    """

    __slots__ = ("_count", "_factor", "_summed", "_values", "_world", "alike")

    def __init__(
        self,
        world: World,
        values: torch.Tensor,
        count: torch.Tensor | float | None,
        scale: float,
        work: Any = None,
    ) -> None:
        self._world, self._factor = world, scale
        self._count: float | None = None
        self.alike, self._summed = True, work is not None
        if isinstance(count, torch.Tensor):
            # One copy of both.
            values = torch.stack([values.double().reshape(()), count.double().reshape(())])
        else:
            self._count = count
            if values.ndim and not self._summed:
                values = values.reshape(())
        self._values = HostCopy(values, work)

    def wait(self) -> tuple[float, float]:
        """The mean loss over all items of all ranks, and their number.

        Raises:
            ConfigError: the ranks are in different steps.
        """
        values = self._values.read()
        if self._summed:
            total, count, places, squares, prints, square_prints, *agreed = values
            self._world._check_places(places, squares)
            self.alike = self._world._are_equal(prints, square_prints)
            own = self._world._agreed
            self._world._agreed = [max(a, b) for a, b in zip(own, agreed, strict=True)]
        elif self._count is None:
            total, count = values
        else:
            total, count = values, self._count
        total *= self._factor
        return (total / count if count else float("nan")), float(count)


def join(
    placement: Placement,
    layout: Layout | None = None,
    *,
    process_group: bool = True,
    may_move: bool = False,
) -> World:
    """Join the run's processes, making the ``torch.distributed`` group unless one exists.

    Args:
        placement: where this process stands.
        layout: how the processes are arranged; left out: as replicas, one each.
        process_group: also make a group when the run has one process (what DDP and FSDP need).
        may_move: on CPUs, whether the processes may compute on GPUs later; see :meth:`World.on`.

    Raises:
        ConfigError: two ranks have the same GPU, or different versions of Python, torch or unipar.
        torch.distributed.DistStoreError: a rank has not come within ``placement.timeout``.
    """
    device = placement.device if placement.device_type == "cuda" else None
    if device is not None:
        torch.cuda.set_device(device)
    owns = False
    if (placement.size > 1 or process_group) and not dist.is_initialized():
        store = HashStore() if placement.size == 1 else meet(placement)
        with _refusing_shared_gpus(placement):
            dist.init_process_group(
                # Both backends in one group: gloo carries the core's own values from the host.
                backend="cpu:gloo,cuda:nccl" if device is not None or may_move else "gloo",
                store=store,
                rank=placement.rank,
                world_size=placement.size,
                timeout=timedelta(seconds=placement.timeout),
                # NCCL connects now, and not in the first collective; which device a rank uses is
                # said, not guessed from its number; and smaller groups are split from this one.
                device_id=device,
            )
        owns = True
    return World(placement, layout, owns_group=owns)


@contextlib.contextmanager
def _refusing_shared_gpus(placement: Placement) -> Iterator[None]:
    """Around the first connection of NCCL."""
    try:
        yield
    except dist.DistBackendError as error:
        if "Duplicate GPU" not in str(error):
            raise
        raise ConfigError(
            f"{placement.local_size} ranks of this machine were started, and more than one of "
            "them has the same GPU. Start as many as there are GPUs; if a scheduler gives each "
            "rank its own, look at CUDA_VISIBLE_DEVICES in each of them."
        ) from error


@contextlib.contextmanager
def joined(placement: Placement, layout: Layout | None = None, *, process_group: bool = True):
    """:func:`join` for the length of a ``with`` block."""
    world = join(placement, layout, process_group=process_group)
    try:
        yield world
    finally:
        world.leave()
