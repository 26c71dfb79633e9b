"""Every option of Horovod's trains the same run as a hand-written loop, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from horovod_plain import (
    RELATIVE,
    Experts,
    Words,
    batches,
    build,
    largest_difference,
    loss_fn,
    reference,
    sgd,
    share,
    train,
)
from torch import nn

import unipar_horovod
from unipar.benchmark.traffic import CollectiveWatcher
from unipar.engine.checks import check_capabilities
from unipar.errors import ConfigError
from unipar.strategy import EngineSpec, registry
from unipar.world import Placement


@pytest.mark.parametrize(
    "strategy",
    [
        "horovod",
        "horovod:fusion_threshold_mb=0",
        "horovod:fusion_threshold_mb=0.0002",
        "horovod:num_groups=3",
        "horovod:gradient_predivide_factor=2.0",
        "horovod:cycle_time_ms=0.2",
        "horovod:broadcast_buffers=false",
        "horovod:autotune=true",
        "horovod:process_sets=[[0]]",
        "horovod:native={HOROVOD_CACHE_CAPACITY: '0'}",
    ],
)
def test_option_trains_the_same_run_where_ranks_use_other_parameters(
    world_pool: Any, strategy: str
) -> None:
    results = world_pool(2).run(train, strategy)
    assert largest_difference(results[0], reference(build())) < RELATIVE
    assert largest_difference(results[1], results[0]) == 0.0


def test_four_ranks_with_groups_of_which_each_rank_has_a_part(world_pool: Any) -> None:
    results = world_pool(4).run(train_in_one_part, "horovod:num_groups=2")
    assert largest_difference(results[0], reference(build())) < RELATIVE


def train_in_one_part(placement: Placement, strategy: str) -> Any:
    prepared = registry.resolve(strategy)
    world = prepared.setup(placement)
    try:
        spec = EngineSpec(build(), optimizer=_adamw, max_grad_norm=0.5)
        engine = prepared.prepare(spec, world)
        losses = [
            engine.train_step(share(batch, placement.rank, placement.size, 1), loss_fn).loss
            for batch in batches()
        ]
        return losses, {name: p.detach() for name, p in engine.module.named_parameters()}
    finally:
        prepared.teardown()
        world.leave()


def _adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=1e-2, weight_decay=0.1)


def test_compressed_gradients_lose_what_they_say(world_pool: Any) -> None:
    results = world_pool(2).run(train, "horovod:compression=fp16")
    # Half precision keeps 11 significant bits of each gradient.
    assert 1e-9 < largest_difference(results[0], reference(build())) < 1e-2


def unclipped(placement: Placement, strategy: str, cls: Any, *change: Any) -> Any:
    return train(placement, strategy, cls, sgd, *change, max_grad_norm=None)


@pytest.mark.parametrize("strategy", ["horovod", "horovod:sparse_as_dense=true"])
def test_sparse_gradients(world_pool: Any, strategy: str) -> None:
    results = world_pool(2).run(unclipped, strategy, Words)
    expected = reference(build(Words), sgd, max_norm=None)
    assert largest_difference(results[0], expected) < RELATIVE


def test_sparse_gradients_are_in_no_group(world_pool: Any) -> None:
    with pytest.raises(ConfigError, match="sparse gradients"):
        world_pool(2).run(unclipped, "horovod:num_groups=2", Words)


def thaw(model: nn.Module, step: int) -> None:
    """The first layer joins in the third step, the last one leaves in the sixth."""
    model.get_submodule("enter").requires_grad_(step >= 3)
    model.get_submodule("leave").requires_grad_(step < 6)


def frozen_first() -> nn.Module:
    model = Experts()
    thaw(model, 0)
    return model


def test_parameters_frozen_and_thawed_on_the_way(world_pool: Any) -> None:
    results = world_pool(2).run(unclipped, "horovod", frozen_first, thaw)
    expected = reference(build(frozen_first), sgd, thaw, max_norm=None)
    assert largest_difference(results[0], expected) < RELATIVE


def adversaries(placement: Placement, strategy: str) -> tuple[list[float], list[float]]:
    """A generator and a discriminator, whose losses each go through the other's parameters."""
    prepared = registry.resolve(strategy)
    world = prepared.setup(placement)
    try:
        torch.manual_seed(1)
        make, judge = (
            prepared.prepare(EngineSpec(model, optimizer=sgd, name=name, accumulation=2), world)
            for name, model in (
                ("make", nn.Linear(6, 6)),
                ("judge", nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))),
            )
        )

        def judge_loss(model: Any, batch: Any) -> torch.Tensor:
            return model(batch[0]).mean() - model(make(batch[0]).detach()).mean()

        def make_loss(model: Any, batch: Any) -> torch.Tensor:
            return judge(model(batch[0])).square().mean()

        found: tuple[list[float], list[float]] = ([], [])
        for batch in batches():
            own = share(batch, placement.rank, placement.size)
            found[0].append(judge.train_step(own, judge_loss).loss)
            found[1].append(make.train_step(own, make_loss).loss)
        return found
    finally:
        prepared.teardown()
        world.leave()


def test_engines_that_train_against_each_other(world_pool: Any) -> None:
    (expected,) = world_pool(1).run(adversaries, "single")
    for found in world_pool(2).run(adversaries, "horovod"):
        assert found[0] == pytest.approx(expected[0], rel=RELATIVE, abs=1e-7)
        assert found[1] == pytest.approx(expected[1], rel=RELATIVE, abs=1e-7)


def gather_in_sets(placement: Placement) -> list[float]:
    import horovod.torch as hvd  # pyright: ignore[reportMissingImports]

    prepared = registry.resolve({"name": "horovod", "process_sets": [[1, 0], [2, 3]]})
    world = prepared.setup(placement)
    try:
        own = unipar_horovod.process_set([0, 1] if world.rank < 2 else [2, 3])
        rank = torch.full((1,), float(world.rank))
        return hvd.allgather(rank, name="ranks", process_set=own).tolist()
    finally:
        prepared.teardown()
        world.leave()


def test_process_sets_are_there_for_collectives_of_ones_own(world_pool: Any) -> None:
    found = world_pool(4).run(gather_in_sets)
    assert found == [[0.0, 1.0], [0.0, 1.0], [2.0, 3.0], [2.0, 3.0]]
    with pytest.raises(ConfigError, match="no process set of ranks"):
        unipar_horovod.process_set([0, 1])


def test_timeline_is_a_trace_of_the_reductions(world_pool: Any, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    world_pool(2).run(train, f"horovod:timeline={path}")
    assert "ALLREDUCE" in path.read_text()


def _check(options: dict[str, Any], size: int = 2, model: nn.Module | None = None) -> None:
    strategy = registry.make("horovod", options)
    spec = EngineSpec(model or build(), optimizer=sgd)
    check_capabilities(strategy, spec, Placement(size=size))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"native": {"HOROVOD_CYCLE_TIME": "2"}}, ["HOROVOD_CYCLE_TIME", "'cycle_time_ms'"]),
        ({"native": {"HOROVOD_RANK": "2"}}, ["HOROVOD_RANK", "Leave it out"]),
        ({"native": {"OMP_NUM_THREADS": "2"}}, ["OMP_NUM_THREADS", "HOROVOD_"]),
        ({"process_sets": [[0, 2]]}, ["rank 2", "the last rank is 1"]),
        ({"process_sets": [[0, 1]]}, ["all 2 ranks", "global_process_set"]),
        ({"process_sets": [[0], [0]]}, ["given twice"]),
        ({"process_sets": [[0, 0]]}, ["no set of ranks"]),
        ({"autotune": True, "cycle_time_ms": 2}, ["autotune", "cycle_time_ms"]),
        ({"timeline": "/nowhere/at/all.json"}, ["timeline", "/nowhere/at"]),
        ({"compression": "bf16"}, ["compression", "fp16"]),
        ({"transport": "mpi"}, ["transport='mpi'"]),
        ({"fusion": 2}, ["fusion", "fusion_threshold_mb"]),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(
    options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        _check(options)
    for word in words:
        assert word in str(refused.value)


def test_a_setting_in_two_places_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "5")
    with pytest.raises(ConfigError, match="cycle_time_ms"):
        _check({"cycle_time_ms": 2})
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "2")
    _check({"cycle_time_ms": 2})


def test_parameters_in_a_precision_that_horovod_does_not_know_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'enter.weight' is torch.bfloat16"):
        _check({}, model=build().bfloat16())


def test_its_collectives_are_counted_for_benchmarks(world_pool: Any) -> None:
    model = build()
    # Beside the gradients goes a number for each parameter: whether a rank has a gradient of it.
    expected = sum(p.nbytes + 4 for p in model.parameters())
    for seen in world_pool(2).run(watched):
        assert {kind for kind, _ in seen} == {"all-reduce"}
        assert sum(size for _, size in seen) == expected


def watched(placement: Placement) -> list[tuple[str, int]]:
    strategy = registry.strategy_class("horovod")
    assert issubclass(strategy, CollectiveWatcher)
    prepared = registry.resolve("horovod")
    world = prepared.setup(placement)
    seen = []
    try:
        engine = prepared.prepare(EngineSpec(build(), optimizer=_adamw), world)
        own = share(batches()[0], placement.rank, placement.size)
        with strategy.watch_collectives(lambda kind, size: seen.append((kind, size))):
            engine.train_step(own, loss_fn)
        engine.train_step(own, loss_fn)
        return seen
    finally:
        prepared.teardown()
        world.leave()
