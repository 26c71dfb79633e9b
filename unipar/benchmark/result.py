"""The result of a benchmark, as stored in ``result.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError

from unipar.benchmark.cells import Cell
from unipar.benchmark.records import KINDS, Memory, Stored, Trial
from unipar.benchmark.statistics import Estimate, Spread
from unipar.benchmark.writing import replace
from unipar.errors import ConfigError

if TYPE_CHECKING:
    import pandas

SCHEMA_VERSION = 1

Status = Literal["measured", "refused", "out of memory", "time limit", "failed", "not run"]


class Machine(Stored):
    """Where it was measured.

    Attributes:
        processor: its name.
        cores: how many this process may use.
        memory: of the host, in bytes.
        accelerators: their names; empty on a CPU.
        system: operating system and release.
        versions: of Python, unipar, torch and the frameworks that took part, by name.
        date: when it began, in UTC, ISO 8601.
    """

    processor: str
    cores: int
    memory: int
    accelerators: list[str]
    system: str
    versions: dict[str, str]
    date: str


class Job(Stored):
    """The job that every cell trained.

    Attributes:
        model: the class of the model.
        parameters: its elements, each counted once.
        global_batch_size: samples of one step over all ranks.
        items: what the loss is a mean over, in one step: samples, or tokens.
        steps: timed steps of one repeat.
        warmup: steps before them, whose times are discarded.
        repeats: how often each cell was run, each in new processes.
        seed: of data order, weights, and the order of the cells.
        flops: of one step's forward and backward pass, as :mod:`torch.utils.flop_counter` counts
            them without recomputation; ``None`` where they could not be counted.
        command: what runs it again.
        run_file: the text of the run file; empty where there is none.
        commit: of the git repository that it was run in; empty where there is none.
    """

    model: str
    parameters: int
    global_batch_size: int
    items: float
    steps: int
    warmup: int
    repeats: int
    seed: int
    flops: float | None
    command: str
    run_file: str = ""
    commit: str = ""


class Parity(Stored):
    """How far a cell's losses are from the reference's.

    Attributes:
        reference: the label of the cell that it is compared with.
        difference: the largest ``|a - b| / |b|`` over the steps.
        allowed: the largest that rounding explains.
        drifts: whether it is more than that.
    """

    reference: str
    difference: float
    allowed: float
    drifts: bool


class CellResult(Stored):
    """One cell, with what follows from its repeats.

    Attributes:
        cell: its shape.
        status: what became of it.
        reason: why it has no measurement, in a sentence; empty where it has.
        environment: the Python that ran it.
        trials: its repeats.
        step_seconds: of the slowest rank, over all timed steps of all repeats.
        repeat_seconds: the median step of each repeat, over the repeats.
        items_per_second: over all ranks; its spread is that of the repeats.
        samples_per_second: likewise.
        setup_seconds: over the repeats.
        first_step_seconds: over the repeats.
        mfu: model FLOPs over what the devices' measured peak would do in the same time.
        predicted: what the formulas give for one rank's memory; kinds without a formula are 0;
            ``None`` where there is none, or the measurement refutes it.
        parity: ``None`` where there is nothing to compare with.
        ties: labels of the cells, with as many devices, that the repeats show to be as fast.
        traces: Chrome traces by rank, as paths in the benchmark's directory.
        load: the share of the cores that other processes had, in the median repeat; ``None`` where
            it is not known, as on accelerators.
        bubble: the share of a pipeline's time that its ranks idle, over steps and repeats;
            ``None`` without a pipeline, or where its passes cannot be timed.
        bubble_formula: the same by :func:`unipar.engine.bubble_of`; ``None`` where that does not
            hold for the schedule.
    """

    cell: Cell
    status: Status
    reason: str = ""
    environment: str = ""
    trials: list[Trial] = Field(default_factory=list)
    step_seconds: Spread | None = None
    repeat_seconds: Spread | None = None
    items_per_second: Spread | None = None
    samples_per_second: Spread | None = None
    setup_seconds: Spread | None = None
    first_step_seconds: Spread | None = None
    mfu: float | None = None
    predicted: Memory | None = None
    parity: Parity | None = None
    ties: list[str] = Field(default_factory=list)
    traces: list[str] = Field(default_factory=list)
    load: float | None = None
    bubble: Spread | None = None
    bubble_formula: float | None = None


class Interconnect(Stored):
    """All-reduce between some number of processes: ``seconds = alpha + beta * bytes``.

    Attributes:
        devices: how many processes.
        points: (bytes of the tensor, median seconds).
        alpha: latency, in seconds.
        beta: seconds a byte.
        matmul_flops: a second, of all processes together, in a large square matrix product, by
            precision: what ``mfu`` is relative to.
    """

    devices: int
    points: list[tuple[int, float]]
    alpha: float
    beta: float
    matmul_flops: dict[str, float]


class Scaling(Stored):
    """How one strategy gains from devices, the global batch staying as it is.

    Attributes:
        label: the cells', which differ in the number of devices only.
        devices: the numbers of devices.
        seconds: median step.
        speedup: beside one device.
        efficiency: speed-up by device.
        serial_fraction: ``s`` of Amdahl's law, ``speedup = 1 / (s + (1 - s) / N)``, by least
            squares; ``None`` with fewer than two numbers of devices.
        modelled: ``T1 / N + calls * alpha + beta * bytes``, in seconds, of each; ``None`` where
            the traffic is not known.
    """

    label: str
    devices: list[int]
    seconds: list[float]
    speedup: list[float]
    efficiency: list[float]
    serial_fraction: float | None
    modelled: list[float | None]


class Overhead(Stored):
    """The cost of unipar beside a hand-written loop.

    Attributes:
        label: the cell's.
        devices: number of processes.
        ratio: of the two median steps of each round.
    """

    label: str
    devices: int
    ratio: Estimate


class BenchResult(Stored):
    """A whole benchmark.

    Attributes:
        schema_version: of this file's form.
        machine: where.
        job: what.
        cells: in the order that was asked for.
        interconnect: by number of devices.
        scaling: of every strategy that ran on several numbers of devices.
        overhead: of every strategy that a hand-written loop ran, too.
        recommendation: what to pick, and why; or why no winner can be named, and what to do.
        winner: the cell to pick; ``None`` where the noise is too large or several are equal.
        interrupted: what ended it before all was run; empty where nothing did.
        reference_losses: of each step, by the label that ``Parity.reference`` gives.
    """

    schema_version: int = SCHEMA_VERSION
    machine: Machine
    job: Job
    cells: list[CellResult]
    interconnect: list[Interconnect]
    scaling: list[Scaling]
    overhead: list[Overhead]
    recommendation: str
    winner: Cell | None = None
    interrupted: str = ""
    reference_losses: dict[str, list[float]] = Field(default_factory=dict)

    @property
    def measured(self) -> list[CellResult]:
        """The cells that have a measurement, the fastest first."""
        found = [cell for cell in self.cells if cell.items_per_second is not None]
        return sorted(found, key=lambda cell: -_median(cell.items_per_second))

    def save(self, path: str | Path) -> None:
        """Write ``result.json``."""
        replace(Path(path), self.model_dump_json(indent=1))

    @classmethod
    def load(cls, path: str | Path) -> BenchResult:
        """Read a ``result.json``, or the one in a directory.

        Raises:
            ConfigError: there is none, or its form is another.
        """
        file = Path(path, "result.json") if Path(path).is_dir() else Path(path)
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{file} cannot be read as a benchmark's result: {error}. Give the directory that "
                "unipar bench wrote to, or its result.json."
            ) from error
        version = data.get("schema_version") if isinstance(data, dict) else None
        if version != SCHEMA_VERSION:
            raise ConfigError(
                f"{file} has schema_version {version}, and this unipar reads {SCHEMA_VERSION}. "
                "Run unipar bench again, or read it with the unipar that wrote it."
            )
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise ConfigError(f"{file} is no benchmark's result: {error}") from error

    @classmethod
    def load_runs(cls, path: str | Path) -> list[BenchResult]:
        """Read one result, or those of several runs that lie in folders of one directory.

        Raises:
            ConfigError: there is none, or its form is another.
        """
        runs = sorted(Path(path).glob("*/result.json"))
        several = runs and not Path(path, "result.json").exists()
        return [cls.load(run) for run in (runs if several else [path])]

    def to_pandas(self) -> pandas.DataFrame:
        """One row for each cell, one column for each figure.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ConfigError("to_pandas needs pandas: pip install pandas.") from error
        return pandas.DataFrame([self.row(cell) for cell in self.cells])

    @property
    def item(self) -> str:
        """Unit of the loss's mean: ``"token"`` where a sample has several, or ``"item"``."""
        return "token" if self.job.items > 1.5 * self.job.global_batch_size else "item"

    def flops_per_second(self, result: CellResult) -> float | None:
        """Of the model, over all ranks: those of a step without recomputation, over its time."""
        if self.job.flops is None or result.step_seconds is None:
            return None
        return self.job.flops / result.step_seconds.median

    def row(self, result: CellResult) -> dict[str, Any]:
        """The figures of one cell, flat: seconds, bytes, and items a second."""
        first = result.trials[0].ranks[0] if result.trials else None
        memory = first.memory if first else None
        traffic = first.traffic if first else None
        overlap = first.overlap if first else None
        return {
            **result.cell.model_dump(),
            "status": result.status,
            "reason": result.reason,
            "step_seconds": _median(result.step_seconds),
            "step_seconds_p5": result.step_seconds.p5 if result.step_seconds else None,
            "step_seconds_p95": result.step_seconds.p95 if result.step_seconds else None,
            "items_per_second": _median(result.items_per_second),
            "samples_per_second": _median(result.samples_per_second),
            "flops_per_second": self.flops_per_second(result),
            "mfu": result.mfu,
            "spread": result.repeat_seconds.relative if result.repeat_seconds else None,
            "load": result.load,
            "setup_seconds": _median(result.setup_seconds),
            "first_step_seconds": _median(result.first_step_seconds),
            "peak_bytes": _peak(result),
            **{f"{kind}_bytes": getattr(memory, kind, None) for kind in KINDS},
            "collectives": None if traffic is None else sum(one.count for one in traffic),
            "traffic_bytes": None if traffic is None else sum(one.bytes for one in traffic),
            "communication_seconds": overlap.communication if overlap else None,
            "exposed_seconds": overlap.exposed if overlap else None,
            "bubble": _median(result.bubble),
            "bubble_formula": result.bubble_formula,
            "loss_difference": result.parity.difference if result.parity else None,
            "drifts": result.parity.drifts if result.parity else None,
        }


def _median(spread: Spread | None) -> Any:
    return None if spread is None else spread.median


def _peak(result: CellResult) -> int | None:
    peaks = [rank.memory.peak for trial in result.trials for rank in trial.ranks if rank.memory]
    return max(peaks, default=None)
