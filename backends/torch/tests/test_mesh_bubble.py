"""How much a pipeline's ranks idle: the formula beside the tables, and stages of known length."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import unipar
from unipar.benchmark.bubble import PassTimes, by_formula, idle_shares, measured
from unipar.benchmark.cells import Cell
from unipar.benchmark.job import BenchJob
from unipar.benchmark.meter import PIPELINED
from unipar.benchmark.records import Passes, Rank
from unipar.benchmark.trial import measure
from unipar.data.batch import Batch, MicroBatch
from unipar.testing import models
from unipar.testing.pool import WorldPools
from unipar.testing.scenarios import NUM_SAMPLES
from unipar.utils.torch_versions import splits_backward_passes
from unipar.world import Placement
from unipar_torch.stage_orders import STYLES, ScheduleName, bubble, order_of
from unipar_torch.stage_plan import rank_of_stage

# -- the formula -----------------------------------------------------------------------------------

COSTS = {"F": 1, "B": 2, "I": 1, "W": 1}


def idle_by_table(schedule: ScheduleName, pp: int, virtual: int, microbatches: int) -> float:
    """The share that ranks idle where passes take so long, and transfers nothing."""
    ranks = range(pp)
    last = pp * virtual - 1
    left = {
        rank: [
            one
            for one in order_of(schedule, pp, virtual, microbatches, rank, training=True)
            if one.kind in COSTS
        ]
        for rank in ranks
    }
    done: dict[tuple[str, int, int], int] = {}
    now, busy = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
    while any(left.values()):
        rank, one = next(
            (rank, actions[0])
            for rank, actions in left.items()
            if actions and set(_needed(actions[0], last)) <= done.keys()
        )
        begin = max([now[rank], *(done[key] for key in _needed(one, last))])
        now[rank] = begin + COSTS[one.kind]
        busy[rank] += COSTS[one.kind]
        done["B" if one.kind == "I" else one.kind, one.stage, one.microbatch] = now[rank]
        left[rank].pop(0)
    return 1 - sum(busy.values()) / pp / max(now.values())


def _needed(one: Any, last: int) -> list[tuple[str, int, int]]:
    if one.kind == "F":
        return [("F", one.stage - 1, one.microbatch)] if one.stage else []
    if one.kind == "W":
        return [("B", one.stage, one.microbatch)]
    after = [("B", one.stage + 1, one.microbatch)] if one.stage < last else []
    return [("F", one.stage, one.microbatch), *after]


TABLES: list[tuple[ScheduleName, int, int, int]] = [
    ("gpipe", 2, 1, 4),
    ("gpipe", 4, 1, 3),
    ("1f1b", 2, 1, 5),
    ("1f1b", 4, 1, 8),
    ("1f1b", 4, 1, 2),
    ("interleaved", 2, 2, 4),
    ("interleaved", 4, 2, 8),
    ("interleaved", 4, 3, 8),
]


@pytest.mark.parametrize(("schedule", "pp", "virtual", "microbatches"), TABLES)
def test_ranks_idle_by_the_table_as_by_the_formula(
    schedule: ScheduleName, pp: int, virtual: int, microbatches: int
) -> None:
    by_table = idle_by_table(schedule, pp, virtual, microbatches)
    assert bubble(schedule, pp, virtual, microbatches) == pytest.approx(by_table)
    assert len(set(rank_of_stage(pp * virtual, pp, STYLES.get(schedule, "loop")))) == pp


def test_no_formula_is_given_for_what_it_does_not_hold_for() -> None:
    assert idle_by_table("interleaved", 4, 2, 6) > 9 / 8 * (3 / (6 * 2 + 3))
    assert bubble("interleaved", 4, 2, 6) is None
    assert bubble("zero-bubble", 2, 2, 4) is None
    assert bubble("dualpipev", 2, 2, 4) is None


# -- stages that take a known time -----------------------------------------------------------------

MICROBATCHES, STEPS = 4, 3


OBJECTIVE = unipar.Objective(
    lambda batch: (batch["x"],),
    lambda output, batch: nn.functional.cross_entropy(output, batch["y"]),
)


class Sleeping(torch.autograd.Function):
    """Takes so many seconds forward, and twice as many backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyright: ignore
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Timed(models.Block):
    def __init__(self, seconds: float) -> None:
        super().__init__(9)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleeping.apply(super().forward(x), self.seconds)  # pyright: ignore


class Known(NamedTuple):
    """Seconds of each block's forward pass, and what follows from them.

    Attributes:
        seconds: of blocks, as many on each stage.
        step: the least that the pipeline takes.
        computing: the least of it that each rank computes.
    """

    seconds: tuple[float, ...]
    step: float
    computing: tuple[float, float]


def passes_of(placement: Placement, seconds: tuple[float, ...], schedule: str) -> Any:
    torch.manual_seed(3)
    model = models.Network()
    model.blocks = nn.ModuleList(Timed(one) for one in seconds)
    data = models.points(NUM_SAMPLES).batch(list(range(2 * MICROBATCHES)))
    parts = [
        MicroBatch({key: value[at : at + 2] for key, value in data.items()}, 2)
        for at in range(0, 2 * MICROBATCHES, 2)
    ]
    strategy = f"mesh:pp=2,schedule={schedule}"
    with unipar.Session(strategy, device="cpu", placement=placement) as session:
        engine: Any = session.prepare(
            model, optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)
        )
        times = PassTimes(engine.schedule, "cpu", engine.world.data_rank)
        for step in range(STEPS + 2):
            watched = 0 < step <= STEPS
            if watched:
                times.__enter__()
            engine.train_step(Batch(tuple(parts), 2 * MICROBATCHES), OBJECTIVE)
            if watched:
                times.__exit__()
        return times.read()


def timed(world_pool: WorldPools, known: Known, schedule: str = "1f1b") -> list[Passes]:
    """The step in which others had the cores least, on each rank."""
    found = world_pool(2).run(passes_of, known.seconds, schedule)
    for passes, computing in zip(found, known.computing, strict=True):
        assert len(passes.whole) == len(passes.computing) == STEPS
        assert min(passes.computing) >= computing
    longest = [max(both) for both in zip(*(one.whole for one in found), strict=True)]
    assert min(longest) >= known.step
    quiet = longest.index(min(longest))
    return [
        Passes(
            pipeline=one.pipeline,
            whole=[one.whole[quiet]],
            computing=[one.computing[quiet]],
            formula=[one.formula[quiet]],
        )
        for one in found
    ]


def idle(found: list[Passes]) -> float:
    ranks = [Rank(rank=i, seconds=[], threads=1, passes=one) for i, one in enumerate(found)]
    (share,) = idle_shares(ranks)
    return share


def test_stages_that_take_as_long_idle_as_the_formula_says(world_pool: WorldPools) -> None:
    unit = 0.03
    found = timed(world_pool, Known((unit, unit), 15 * unit, (12 * unit, 12 * unit)))
    assert found[0].formula == found[1].formula == [0.2]
    # A fifth, and what transfers take where others have the cores.
    assert 0.15 < idle(found) < 0.4


def test_a_stage_that_takes_three_times_as_long_makes_the_other_idle(
    world_pool: WorldPools,
) -> None:
    unit = 0.02
    found = timed(world_pool, Known((unit, 3 * unit), 39 * unit, (12 * unit, 36 * unit)))
    # 1 - (12 + 36) / 2 / 39, and for each rank alone 1 - 12 / 39 and 1 - 36 / 39.
    assert 0.33 < idle(found) < 0.55
    alone = [1 - one.computing[0] / found[0].whole[0] for one in found]
    assert alone[0] > 0.6
    assert alone[1] < 0.3


@pytest.mark.skipif(
    not splits_backward_passes(), reason="torch 2.13 splits backward passes rightly"
)
def test_passes_that_are_split_count_in_both_parts(world_pool: WorldPools) -> None:
    unit = 0.015
    known = Known((unit,) * 4, 24 * unit, (24 * unit, 24 * unit))
    for passes in timed(world_pool, known, "zero-bubble"):
        assert passes.formula == [None]
        assert passes.computing[0] < passes.whole[0]


# -- in a benchmark --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_trial_times_the_steps_after_those_that_it_compares(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        "model": models.Network,
        "data": models.points(NUM_SAMPLES),
        "loss": OBJECTIVE,
        "optimizer": {"name": "sgd", "lr": 0.1},
        "global_batch_size": 8,
    }
    job = BenchJob(arguments, warmup=1, steps=2)
    cell = Cell(strategy="mesh:pp=2", devices=2, micro_batch_size=2)
    request = {"cell": cell.model_dump(), "repeat": 0, "trace": False, "began": time.time()}
    trial = measure(job, tmp_path, request).trial
    for rank in trial.ranks:
        assert len(rank.seconds) == 2
        assert rank.passes is not None
        assert rank.passes.formula == [0.2] * PIPELINED
        times = zip(rank.passes.computing, rank.passes.whole, strict=True)
        assert all(0 < computing < whole for computing, whole in times)
        # Each of the other looks has had its step, too.
        assert rank.traffic
        assert rank.memory is not None
        assert rank.overlap is not None
    assert by_formula([trial]) == 0.2
    found = measured([trial])
    assert found is not None
    assert found.count == PIPELINED
