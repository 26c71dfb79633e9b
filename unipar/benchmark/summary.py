"""The summary of a benchmark from the findings of its trials."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from unipar.benchmark import bubble
from unipar.benchmark.cells import Cell
from unipar.benchmark.recommend import judge, recommend
from unipar.benchmark.records import Memory, Trial
from unipar.benchmark.reference import Reference
from unipar.benchmark.result import BenchResult, CellResult, Interconnect, Job, Machine, Overhead
from unipar.benchmark.rounds import paired, slowest, step_time
from unipar.benchmark.scaling import scalings
from unipar.benchmark.statistics import Spread
from unipar.benchmark.store import Failure, Finding, Store
from unipar.strategy import Precision

_FP32 = 4
_REFUTED = 0.1
"""A prediction that is so far off, relatively, is none."""
_MOMENTS = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2}
"""Tensors like a parameter that an optimizer keeps of it."""


def summarize(
    machine: Machine,
    job: Job,
    cells: Sequence[Cell],
    store: Store,
    references: Mapping[Precision, Reference],
    interconnects: Sequence[Interconnect],
    interrupted: str = "",
) -> BenchResult:
    """Put everything together that the trials in a directory have found so far."""
    links = {link.devices: link for link in interconnects}
    results = [
        _cell(
            cell,
            store.findings(cell),
            store.failure(cell),
            store.traces(cell),
            job,
            references.get(cell.precision),
            links.get(cell.devices),
        )
        for cell in cells
    ]
    results = [one.model_copy(update={"ties": _ties(one, results)}) for one in results]
    scaling = scalings(results, interconnects)
    winner = judge(results, scaling).winner
    return BenchResult(
        machine=machine,
        job=job,
        cells=results,
        interconnect=list(interconnects),
        scaling=scaling,
        overhead=_overheads(results),
        recommendation=recommend(results, scaling),
        interrupted=interrupted,
        winner=winner.cell if winner else None,
        reference_losses={one.label: one.losses for one in references.values()},
    )


def _cell(
    cell: Cell,
    found: Sequence[Finding],
    failure: Failure | None,
    traces: list[str],
    job: Job,
    reference: Reference | None,
    link: Interconnect | None,
) -> CellResult:
    if failure is not None:
        return CellResult(
            cell=cell,
            status=failure.status,
            reason=failure.reason,
            environment=failure.environment,
        )
    if not found:
        return CellResult(cell=cell, status="not run", reason="the benchmark ended before it.")
    trials = [one.trial for one in found]
    steps = [seconds for trial in trials for seconds in slowest(trial)]
    medians = [step_time(trial) for trial in trials]
    step = Spread.of(steps)
    peak = link.matmul_flops.get(cell.precision) if link else None
    loads = [trial.load for trial in trials if trial.load is not None]
    # A hand-written loop says nothing of items, and its losses are its own affair.
    first = found[0]
    return CellResult(
        cell=cell,
        status="measured",
        environment=first.environment,
        trials=trials,
        step_seconds=step,
        repeat_seconds=Spread.of(medians),
        items_per_second=Spread.of([first.items / one for one in medians]),
        samples_per_second=Spread.of([first.samples / one for one in medians]),
        setup_seconds=Spread.of([trial.setup_seconds for trial in trials]),
        first_step_seconds=Spread.of([trial.first_step_seconds for trial in trials]),
        mfu=job.flops / (step.median * peak) if job.flops and peak else None,
        predicted=_unrefuted(predicted(first, job.parameters, cell.devices), trials[0]),
        traces=traces,
        parity=reference.parity(trials[0].losses) if reference else None,
        load=statistics.median(loads) if loads else None,
        bubble=bubble.measured(trials),
        bubble_formula=bubble.by_formula(trials),
    )


def predicted(found: Finding, parameters: int, devices: int) -> Memory | None:
    """Bytes of one rank by the formulas of Rajbhandari et al., "ZeRO" (2020), in fp32.

    Parameters and gradients take 4 bytes an element; each moment of the optimizer 4 more, and so
    do copies that it updates in place of the parameters. What a strategy divides is divided by the
    number of devices. ``None`` where the optimizer has no formula here.

    Args:
        found: what a trial found of the strategy.
        parameters: elements of the whole model; what a rank counts may be its share alone.
        devices: number of ranks.
    """
    moments = _MOMENTS.get(found.optimizer)
    if moments is None:
        return None

    def share(kind: str, copies: int) -> int:
        size = _FP32 * copies * parameters
        return -(-size // devices) if kind in found.sharded else size

    return Memory(
        parameters=share("parameters", 1),
        gradients=share("gradients", 1),
        optimizer=share("optimizer", moments + found.copies),
        activations=0,
        other=0,
        peak=0,
    )


def _unrefuted(predicted: Memory | None, trial: Trial) -> Memory | None:
    """The prediction, unless what a rank was seen to hold is another order of things.

    A formula knows nothing of how a framework lays out what it divides: ZeRO-1 of one frees the
    gradients of others before the update, that of another does not.
    """
    seen = [rank.memory for rank in trial.ranks if rank.memory]
    if predicted is None or not seen:
        return predicted
    fullest = max(_state(one) for one in seen)
    return predicted if abs(_state(predicted) - fullest) <= _REFUTED * fullest else None


def _state(memory: Memory) -> int:
    return memory.parameters + memory.gradients + memory.optimizer


def _ties(one: CellResult, results: Sequence[CellResult]) -> list[str]:
    """The cells on as many devices of which the repeats show that they are as fast."""
    return [
        other.cell.label
        for other in results
        if other.cell != one.cell
        and other.cell.devices == one.cell.devices
        and (ratio := paired(one, other)) is not None
        and ratio.verdict() == "same"
    ]


def _overheads(results: Sequence[CellResult]) -> list[Overhead]:
    by_cell = {one.cell: one for one in results}
    found = []
    for one in results:
        by_hand = by_cell.get(one.cell.model_copy(update={"raw": True}))
        if one.cell.raw or by_hand is None:
            continue
        if (ratio := paired(one, by_hand)) is not None:
            found.append(Overhead(label=one.cell.label, devices=one.cell.devices, ratio=ratio))
    return found
