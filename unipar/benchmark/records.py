"""Records of what each process of a benchmark measured."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict


class Stored(BaseModel):
    """A record of a benchmark, as JSON holds it."""

    # A loss that is no number is a finding, and must survive the file.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class Traffic(Stored):
    """Collectives of one kind that one rank made in one step.

    Attributes:
        kind: ``"all-reduce"``, ``"all-gather"``, ``"reduce-scatter"``, ``"all-to-all"``,
            ``"broadcast"``, ``"send"``, ``"receive"``, or another of the framework's own.
        count: how many.
        bytes: of the whole tensors that they reduced or put together, all of them added up.
    """

    kind: str
    count: int
    bytes: int


class Memory(Stored):
    """Bytes of one rank.

    Attributes:
        parameters: the module's, as this rank holds them.
        gradients: when all of a step are there, before the update.
        optimizer: moments, and fp32 copies that the optimizer updates.
        activations: the most that autograd has kept for a backward pass at once; ``None`` where
            activations are recomputed selectively, and kept where autograd does not see them.
        other: other tensors that outlive a step: a framework's buckets and buffers.
        peak: the most that the rank has held: of the device's allocator, or resident on a CPU.
        resident: on a CPU, what was resident before the model was built; part of ``peak``.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int | None
    other: int
    peak: int
    resident: int = 0

    @property
    def tensors(self) -> int:
        """All kinds together, as far as they are known."""
        known = self.activations or 0
        return self.parameters + self.gradients + self.optimizer + known + self.other


class Overlap(Stored):
    """How much of a step's communication something was computed beside, by the profiler.

    Attributes:
        step: seconds of the step, which the profiler slows down.
        communication: seconds of it in which a collective was under way.
        exposed: seconds of these in which no operator (on a GPU: no kernel) computed.
    """

    step: float
    communication: float
    exposed: float


class Passes(Stored):
    """Times of one rank of a pipeline, of each of some steps.

    Attributes:
        pipeline: which, where several run on different samples.
        whole: seconds of the step's pipeline: from the first pass or transfer to the last, without
            the reduction of gradients and the optimizer that follow.
        computing: seconds of these in forward and backward passes of micro-batches.
        formula: the share that ranks idle, by :func:`unipar.engine.bubble_of`; ``None`` where that
            does not hold for the schedule.
    """

    pipeline: int
    whole: list[float]
    computing: list[float]
    formula: list[float | None]


class Rank(Stored):
    """One rank's measurements in one repeat.

    Attributes:
        rank: which.
        seconds: of each timed step, from the end of the step before.
        threads: that torch computes with.
        memory: ``None`` where it was not measured, as in a hand-written loop.
        traffic: of one step; ``None`` where it was not measured.
        overlap: of one step; ``None`` where the profiler does not see all collectives, or none.
        passes: of a pipeline; ``None`` without one, or where its passes cannot be timed.
    """

    rank: int
    seconds: list[float]
    threads: int
    memory: Memory | None = None
    traffic: list[Traffic] | None = None
    overlap: Overlap | None = None
    passes: Passes | None = None


class Usage(Stored):
    """Time of processors, of a moment or between two.

    Attributes:
        wall: seconds on the clock.
        cores: that there are to be used.
        busy: seconds in which these did anything, added up.
        own: seconds in which they worked for this process and those that it started.
    """

    wall: float
    cores: int
    busy: float
    own: float

    def since(self, before: Usage) -> Usage:
        """Between an earlier moment and this one."""
        return Usage(
            wall=self.wall - before.wall,
            cores=self.cores,
            busy=self.busy - before.busy,
            own=self.own - before.own,
        )


class RankRecord(Stored):
    """The file that one rank leaves, for the trial to be put together from.

    Attributes:
        rank: its measurements.
        losses: of every step, warm-up included.
        items: what the loss is a mean over in a step, over all ranks.
        samples: of a step, over all ranks.
        setup_seconds: from the start of the processes until the model was ready.
        first_step_seconds: from the start of the processes until the first step was done.
        parameters: elements of the model; 0 where nobody has counted them.
        optimizer: its class; empty where it is not known.
        copies: whether the optimizer updates copies of the parameters.
        usage: of the processors from the first step to the last; ``None`` where nobody has looked.
    """

    rank: Rank
    losses: list[float]
    items: float
    samples: float
    setup_seconds: float
    first_step_seconds: float
    parameters: int = 0
    optimizer: str = ""
    copies: bool = False
    usage: Usage | None = None

    def write(self, directory: Path) -> None:
        """Leave it for :meth:`read`."""
        _file(directory, self.rank.rank).write_text(self.model_dump_json())

    @classmethod
    def read(cls, directory: Path, rank: int) -> RankRecord:
        """Read what a rank has left."""
        return cls.model_validate_json(_file(directory, rank).read_text())


def _file(directory: Path, rank: int) -> Path:
    return directory / f"rank{rank}.json"


class Trial(Stored):
    """One repeat of one cell.

    Attributes:
        repeat: which, from 0; repeats of equal number ran in the same round.
        losses: of every step, warm-up included.
        setup_seconds: from the start of the processes until the model was ready.
        first_step_seconds: from the start of the processes until the first step was done.
        ranks: by rank.
        load: the share of the cores that other processes had meanwhile; ``None`` on accelerators,
            and where it is not known.
    """

    repeat: int
    losses: list[float]
    setup_seconds: float
    first_step_seconds: float
    ranks: list[Rank]
    load: float | None = None


KINDS = ("parameters", "gradients", "optimizer", "activations", "other")
"""What :class:`Memory` tells apart."""
