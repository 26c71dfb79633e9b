"""Benchmark results whose figures are made up by formulas that are known."""

from __future__ import annotations

import random
from typing import Any

from unipar.benchmark.cells import Cell
from unipar.benchmark.recommend import judge, recommend
from unipar.benchmark.records import Memory, Overlap, Rank, Traffic, Trial
from unipar.benchmark.result import (
    BenchResult,
    CellResult,
    Interconnect,
    Job,
    Machine,
    Overhead,
    Parity,
    Scaling,
    Status,
)
from unipar.benchmark.statistics import Estimate, Spread

MIB = 1 << 20
STEPS, WARMUP = 20, 5
ITEMS = 8 * 128.0
PARAMETERS = 3_200_000
ALPHA, BETA = 80e-6, 0.4e-9
SECONDS = {
    "single": 0.160,
    "ddp": 0.161,
    "fsdp": 0.162,
    "deepspeed:stage=3": 0.175,
    "horovod": 0.165,
    "colossalai:plugin=gemini": 0.190,
}
SERIAL = {"ddp": 0.10, "fsdp": 0.10, "deepspeed:stage=3": 0.22, "horovod": 0.02}
SHARDED = ("fsdp", "deepspeed:stage=3", "colossalai:plugin=gemini")
GATHERED = 2 * 4 * PARAMETERS


def bench_result(*, slower: dict[str, float] | None = None, seed: int = 0) -> BenchResult:
    """Six strategies on 1, 2 and 4 devices, three repeats each.

    ``single`` is refused on more than one device, gemini runs out of memory on one, horovod drifts
    on four, and ddp and fsdp tie on two.

    Args:
        slower: by strategy, how many times as slow as it is otherwise.
        seed: of the noise.
    """
    noise = random.Random(seed)
    cells = [
        _cell(strategy, devices, (slower or {}).get(strategy, 1.0), noise)
        for devices in (1, 2, 4)
        for strategy in SECONDS
    ]
    raw = measured(Cell(strategy="ddp", devices=2, raw=True), 0.0876, noise)
    cells = [_with_ties(cell, cells) for cell in cells] + [raw]
    scaling = [found for strategy in SECONDS if (found := _scaling(strategy, cells))]
    winner = judge(cells, scaling).winner
    ratios = [noise.gauss(1.008, 0.003) for _ in range(3)]
    return BenchResult(
        machine=Machine(
            processor="Example Processor 9000",
            cores=4,
            memory=32 << 30,
            accelerators=[],
            system="Linux 6.1",
            versions={"Python": "3.11.7", "unipar": "0.1.0", "torch": "2.13.0+cpu"},
            date="2026-01-31T12:00:00Z",
        ),
        job=Job(
            model="GPT",
            parameters=PARAMETERS,
            global_batch_size=8,
            items=ITEMS,
            steps=STEPS,
            warmup=WARMUP,
            repeats=3,
            seed=0,
            flops=6.0 * PARAMETERS * ITEMS,
            command="unipar bench run.yaml --strategies single,ddp --devices 1,2,4 --repeats 3",
        ),
        cells=cells,
        interconnect=[_interconnect(devices, noise) for devices in (2, 4)],
        scaling=scaling,
        overhead=[Overhead(label="ddp", devices=2, ratio=Estimate.of(ratios, [1.0] * 3))],
        recommendation=recommend(cells, scaling),
        winner=winner.cell if winner else None,
    )


def measured(cell: Cell, seconds: float, noise: random.Random, **changes: Any) -> CellResult:
    """A cell whose steps take ``seconds``, give or take 2 %, and its repeats 1 %."""
    trials = [_trial(cell, repeat, seconds * noise.gauss(1.0, 0.01), noise) for repeat in range(3)]
    steps = [
        [max(of_ranks) for of_ranks in zip(*(rank.seconds for rank in trial.ranks), strict=True)]
        for trial in trials
    ]
    medians = [Spread.of(one).median for one in steps]
    return CellResult(
        cell=cell,
        status="measured",
        environment="/opt/venv/bin/python",
        trials=trials,
        step_seconds=Spread.of([one for times in steps for one in times]),
        repeat_seconds=Spread.of(medians),
        items_per_second=Spread.of([ITEMS / one for one in medians]),
        samples_per_second=Spread.of([8 / one for one in medians]),
        setup_seconds=Spread.of([2.0, 2.1, 2.2]),
        first_step_seconds=Spread.of([2.4, 2.5, 2.6]),
        mfu=None if cell.raw else 0.4 * 0.16 / (seconds * cell.devices),
        predicted=None if cell.raw else _memory(cell, predicted=True),
        parity=_parity(cell),
    ).model_copy(update=changes)


def failed(cell: Cell, status: Status, reason: str) -> CellResult:
    """A cell that was not measured."""
    return CellResult(cell=cell, status=status, reason=reason)


def _cell(strategy: str, devices: int, factor: float, noise: random.Random) -> CellResult:
    cell = Cell(strategy=strategy, devices=devices)
    if strategy == "single" and devices > 1:
        return failed(cell, "refused", f"strategy 'single' runs on 1 process, not on {devices}.")
    if strategy == "colossalai:plugin=gemini" and devices == 1:
        return failed(cell, "out of memory", "rank 0 was killed at 31.2 GiB of 32 GiB.")
    serial = SERIAL.get(strategy, 0.15)
    return measured(cell, factor * SECONDS[strategy] * (serial + (1 - serial) / devices), noise)


def _trial(cell: Cell, repeat: int, seconds: float, noise: random.Random) -> Trial:
    drift = 3e-2 if cell.strategy == "horovod" and cell.devices == 4 else 2e-7 * cell.devices
    drift = 0.0 if cell.strategy == "single" else drift
    return Trial(
        repeat=repeat,
        losses=[
            (5.5 * 0.97**step + 1.0) * (1 + drift * step / (STEPS + WARMUP))
            for step in range(STEPS + WARMUP)
        ],
        setup_seconds=2.0,
        first_step_seconds=2.5,
        ranks=[
            Rank(
                rank=rank,
                seconds=[seconds * noise.gauss(1.0, 0.02) for _ in range(STEPS)],
                threads=1,
                memory=None if cell.raw else _memory(cell, rank=rank),
                traffic=None if cell.raw else _traffic(cell),
                overlap=_overlap(cell, seconds),
            )
            for rank in range(cell.devices)
        ],
    )


def _memory(cell: Cell, rank: int = 0, *, predicted: bool = False) -> Memory:
    share = cell.devices if cell.strategy in SHARDED else 1
    bucket = 0 if cell.strategy == "single" or predicted else 4 * PARAMETERS
    kinds = {
        "parameters": 4 * PARAMETERS // share,
        "gradients": 4 * PARAMETERS // share,
        "optimizer": 8 * PARAMETERS // share,
        "activations": 0 if predicted else 60 * MIB // cell.devices,
        "other": bucket + rank * MIB,
    }
    resident = 0 if predicted else 210 * MIB
    return Memory(**kinds, peak=sum(kinds.values()) + resident, resident=resident)


def _traffic(cell: Cell) -> list[Traffic]:
    if cell.devices == 1:
        return []
    if cell.strategy in SHARDED:
        return [
            Traffic(kind="all-gather", count=18, bytes=GATHERED),
            Traffic(kind="reduce-scatter", count=9, bytes=4 * PARAMETERS),
        ]
    return [Traffic(kind="all-reduce", count=3, bytes=4 * PARAMETERS)]


def _overlap(cell: Cell, seconds: float) -> Overlap | None:
    if cell.devices == 1 or cell.raw or cell.strategy == "horovod":
        return None
    communication = 0.4 * seconds
    exposed = (0.75 if cell.strategy in SHARDED else 0.25) * communication
    return Overlap(step=1.5 * seconds, communication=communication, exposed=exposed)


def _parity(cell: Cell) -> Parity | None:
    if cell.strategy == "single" or cell.raw:
        return None
    drifts = cell.strategy == "horovod" and cell.devices == 4
    difference = 2.9e-2 if drifts else 2e-7 * cell.devices
    return Parity(reference="single", difference=difference, allowed=1e-5, drifts=drifts)


def _with_ties(cell: CellResult, cells: list[CellResult]) -> CellResult:
    """Steps that differ by less than 3 % are ties."""
    if cell.step_seconds is None:
        return cell
    own = cell.step_seconds.median
    ties = [
        other.cell.label
        for other in cells
        if other.step_seconds
        and other.cell != cell.cell
        and other.cell.devices == cell.cell.devices
        and abs(other.step_seconds.median / own - 1) < 0.03
    ]
    return cell.model_copy(update={"ties": ties})


def _scaling(strategy: str, cells: list[CellResult]) -> Scaling | None:
    times = {
        cell.cell.devices: cell.step_seconds.median
        for cell in cells
        if cell.cell.strategy == strategy and not cell.cell.raw and cell.step_seconds
    }
    if len(times) < 2:
        return None
    alone = times.get(1, SECONDS[strategy])
    speedup = [alone / seconds for seconds in times.values()]
    calls, size = (27, GATHERED + 4 * PARAMETERS) if strategy in SHARDED else (3, 4 * PARAMETERS)
    return Scaling(
        label=strategy,
        devices=list(times),
        seconds=list(times.values()),
        speedup=speedup,
        efficiency=[gain / count for gain, count in zip(speedup, times, strict=True)],
        serial_fraction=SERIAL.get(strategy, 0.15),
        modelled=[
            alone / count + (calls * ALPHA + BETA * size if count > 1 else 0.0) for count in times
        ],
    )


def _interconnect(devices: int, noise: random.Random) -> Interconnect:
    sizes = [1 << power for power in range(10, 25, 2)]
    return Interconnect(
        devices=devices,
        points=[(size, (ALPHA + BETA * size) * noise.gauss(1.0, 0.05)) for size in sizes],
        alpha=ALPHA,
        beta=BETA,
        matmul_flops={"fp32": 2.0e11},
    )
