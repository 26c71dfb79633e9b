"""``fit`` on the ranks of a world that is there already, as a launcher leaves it."""

from __future__ import annotations

import copy
import os
import pickle
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from small_run import (
    Net,
    Watched,
    accuracy,
    build,
    data,
    fit_in_world,
    loss_fn,
    make_scheduler,
    reference,
    settings,
)
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from unipar import Callback, RunInfo, StepRecord, fit, load_model
from unipar.errors import ConfigError, DataError, NonFiniteLossError, Terminated
from unipar.testing.pool import WorldPools
from unipar.world import Flag, Placement

STRATEGIES = ["ddp", "ddp:shard_optimizer=true", "fsdp", "fsdp:sharding=hybrid"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", [None, build], ids=["module", "function"])
def test_two_ranks_train_the_run_of_the_plain_loop(
    world_pool: WorldPools, tmp_path: Path, strategy: str, model: Any
):
    task = partial(
        fit_in_world,
        directory=tmp_path,
        model=model,
        strategy=strategy,
        lr_scheduler=make_scheduler,
        micro_batch_size=3,
    )
    results = world_pool(2).run(task)
    losses, _ = reference(scheduler=True)
    for result in results:
        assert result.losses == pytest.approx(losses, rel=1e-5)
    assert len(results[0].peak_memory) == 2


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_evaluation_counts_every_sample_once_over_ranks(
    world_pool: WorldPools, tmp_path: Path, strategy: str
):
    """28 samples in batches of 6 over 2 ranks: the last batch is ragged."""

    def task(placement: Placement) -> Any:
        return fit_in_world(
            placement,
            tmp_path,
            strategy=strategy,
            eval_data=data(),
            micro_batch_size=3,
            eval_every=3,
            metrics={
                "accuracy": accuracy,
                "theirs": torchmetrics.Accuracy("multiclass", num_classes=3),
            },
        )

    results = world_pool(2).run(task)
    x, y = data().tensors
    expected = []
    for steps in (3, 6):
        _, model = reference(steps)
        with torch.no_grad():
            predictions = model(x)
        right = accuracy(predictions, y).item()
        loss = nn.functional.cross_entropy(predictions, y).item()
        expected.append({"loss": loss, "accuracy": right, "theirs": right})
    for result in results:
        assert [step for step, _ in result.evaluations] == [3, 6]
        for (_, found), wanted in zip(result.evaluations, expected, strict=True):
            assert found == pytest.approx(wanted, rel=1e-5)
    assert results[0].evaluations == results[1].evaluations


class Seen(Callback):
    """What a rank's callback is told."""

    def __init__(self, directory: Path, every_rank: bool) -> None:
        self.directory, self.every_rank = directory, every_rank

    def on_run_start(self, run: Any) -> None:
        (self.directory / f"{self.every_rank}-{run.rank}").touch()


def test_callbacks_run_on_rank_0_or_on_every_rank(world_pool: WorldPools, tmp_path: Path):
    callbacks = [Seen(tmp_path, every_rank) for every_rank in (True, False)]
    task = partial(fit_in_world, strategy="ddp", steps=1, callbacks=callbacks)
    world_pool(2).run(task, tmp_path / "run")
    assert {p.name for p in tmp_path.iterdir()} == {"run", "True-0", "True-1", "False-0"}


def test_dropout_differs_between_ranks_and_repeats(world_pool: WorldPools, tmp_path: Path):
    class Masks(Net):
        """Its loss is the number of elements that dropout has left."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = self.dropout(torch.ones(len(x), 64)).sum()
            return super().forward(x) * 0 + kept

    def task(placement: Placement, name: str) -> list[float]:
        torch.manual_seed(1)
        kept: list[float] = []

        def loss(model: Any, batch: Any) -> torch.Tensor:
            value = model(batch[0]).mean()
            kept.append(float(value))
            return value

        fit_in_world(placement, tmp_path / name, Masks(0.5), strategy="ddp", loss=loss, steps=4)
        return kept

    first, again = (world_pool(2).run(task, name) for name in "ab")
    assert first == again
    assert first[0] != first[1]


def test_a_sample_that_raises_names_its_rank(world_pool: WorldPools, tmp_path: Path):
    def broken() -> None:
        raise ValueError("truncated")

    def task(placement: Placement) -> Any:
        # Unshuffled, sample 5 is on the second rank.
        samples = Watched(5, broken)
        return fit_in_world(placement, tmp_path, None, samples, strategy="ddp", shuffle=False)

    with pytest.raises(DataError, match="rank 1: sample 5 of Watched raised ValueError: truncated"):
        world_pool(2).run(task)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_loss_that_is_not_finite_on_one_rank_stops_all(
    world_pool: WorldPools, tmp_path: Path, strategy: str
):
    def task(placement: Placement) -> int:
        calls = iter(range(100))

        def explodes(model: Any, batch: Any) -> torch.Tensor:
            bad = placement.rank == 1 and next(calls) == 2
            return loss_fn(model, batch) * (float("nan") if bad else 1)

        with pytest.raises(NonFiniteLossError) as caught:
            fit_in_world(placement, tmp_path, strategy=strategy, loss=explodes)
        return caught.value.step

    assert world_pool(2).run(task) == [3, 3]


def test_an_interrupt_on_one_rank_saves_on_all_at_the_same_step(
    world_pool: WorldPools, tmp_path: Path
):
    class Interrupt(Callback):
        every_rank = True

        def on_step_end(self, run: Any, record: Any) -> None:
            if run.rank == 1 and record.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    def task(placement: Placement) -> str:
        try:
            fit_in_world(
                placement, tmp_path, strategy="ddp", checkpoint={}, callbacks=[Interrupt()]
            )
        except Terminated as stopped:
            return str(stopped)
        return "ended"

    def resume(placement: Placement) -> list[float]:
        changes: dict[str, Any] = {"strategy": "fsdp", "checkpoint": {}, "resume": "auto"}
        return fit_in_world(placement, tmp_path, **changes).losses

    assert world_pool(2).run(task) == ["SIGTERM"] * 2
    rest = world_pool(2).run(resume)[0]
    losses = reference()[0]
    assert 0 < len(rest) < len(losses) - 1
    assert rest == pytest.approx(losses[-len(rest) :], rel=1e-5)


def test_a_minute_passes_on_one_ranks_clock_and_all_save(world_pool: WorldPools, tmp_path: Path):
    def task(placement: Placement) -> list[str]:
        from unipar.train.checkpointing import Saver

        before = Saver.due

        def due(self: Saver, step: int, metrics: Any) -> bool:
            if placement.rank == 1 and step == 2:
                self.session.world.raise_flag(Flag.CHECKPOINT)
            return before(self, step, metrics)

        Saver.due = due
        try:
            fit_in_world(
                placement,
                tmp_path,
                strategy="ddp",
                checkpoint={"every_minutes": 60, "save_final": False},
            )
        finally:
            Saver.due = before
        return sorted(p.name for p in (tmp_path / "checkpoints").iterdir())

    assert world_pool(2).run(task)[0] == ["step-00000003"]


def test_the_largest_micro_batch_is_what_fits_on_every_rank(world_pool: WorldPools, tmp_path: Path):
    class Narrow(Net):
        limit = 99

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) > self.limit:
                raise torch.OutOfMemoryError("no room")
            return super().forward(x)

    def task(placement: Placement, strategy: str) -> Any:
        torch.manual_seed(1)
        model = Narrow()
        model.limit = 2 if placement.rank == 1 or strategy == "fsdp" else 4
        result = fit_in_world(
            placement, tmp_path / strategy, model, strategy=strategy, micro_batch_size="auto"
        )
        return result.losses

    strategies = ["ddp", "fsdp"]
    if not hasattr(FSDPModule, "reset_iter_state"):
        strategies.remove("fsdp")
        with pytest.raises(ConfigError, match=r"Give numbers, or use torch 2\.13 or newer"):
            world_pool(2).run(task, "fsdp")
    for strategy in strategies:
        for losses in world_pool(2).run(task, strategy):
            assert losses == pytest.approx(reference()[0], rel=1e-5)


def test_too_many_ranks_for_a_strategy_are_refused(world_pool: WorldPools, tmp_path: Path):
    with pytest.raises(ConfigError, match="'single' runs on one device, and 2 were asked for"):
        world_pool(2).run(fit_in_world, tmp_path)


def test_more_ranks_than_samples_in_a_batch(world_pool: WorldPools, tmp_path: Path):
    """The other rank runs padding and counts nothing."""
    task = partial(fit_in_world, strategy="fsdp", global_batch_size=1, steps=3)
    results = world_pool(2).run(task, tmp_path)
    alone = fit(build(), data(), **settings(tmp_path / "alone", global_batch_size=1, steps=3))
    for result in results:
        assert {r.num_samples for r in result.history} == {1}
        assert result.losses == pytest.approx(alone.losses, rel=1e-5)


class Pieces(torchmetrics.Metric):
    """Keeps a tensor for each sample, as metrics of detection and retrieval do."""

    kept: list[torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("kept", [], dist_reduce_fx=None)
        self.add_state("largest", torch.tensor(0), dist_reduce_fx="max")

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        self.kept += [row[: i + 1] for i, row in zip(target.tolist(), preds, strict=True)]
        self.largest = max(self.largest, target.max())

    def compute(self) -> torch.Tensor:
        return torch.cat(self.kept).sum() * len(self.kept) + self.largest


class Unmerged:
    """Counts right predictions, and knows of no other ranks."""

    def reset(self) -> None:
        self.right = self.seen = 0

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        self.right += int((preds.argmax(-1) == target).sum())
        self.seen += len(target)

    def compute(self) -> float:
        return self.right / self.seen


class Merged(Unmerged):
    """As torcheval's metrics."""

    def to(self, device: torch.device) -> None:
        self.device = device

    def merge_state(self, metrics: list[Merged]) -> Merged:
        for other in metrics:
            self.right += other.right
            self.seen += other.seen
        return self


class Rounded(Merged):
    """Another number on each rank."""

    def compute(self) -> float:
        return super().compute() + 1e-9 * torch.distributed.get_rank()


def test_ranks_act_on_one_number_where_they_compute_others(
    world_pool: WorldPools, tmp_path: Path
) -> None:
    task = partial(
        fit_in_world, strategy="ddp", steps=1, eval_data=data(9), metrics={"right": Rounded()}
    )
    first, second = world_pool(2).run(task, tmp_path)
    assert first.metrics == second.metrics


def test_a_metric_may_be_of_a_class_that_processes_know_by_value(
    world_pool: WorldPools, tmp_path: Path
) -> None:
    class Own(Merged):
        pass

    task = partial(fit_in_world, strategy="ddp", steps=1, eval_data=data(9))
    expected = world_pool(2).run(
        lambda placement: task(placement, tmp_path / "one", metrics={"right": Merged()})
    )
    found = world_pool(2).run(
        lambda placement: task(placement, tmp_path / "two", metrics={"right": Own()})
    )
    assert [one.metrics for one in found] == [one.metrics for one in expected]


def test_a_metric_that_no_one_can_merge_is_refused_on_ranks(
    world_pool: WorldPools, tmp_path: Path, run: Any
) -> None:
    metrics = {"right": Unmerged()}
    alone = run(strategy="single", steps=1, eval_data=data(9), metrics=metrics)
    assert 0 < alone.metrics["right"] < 1
    task = partial(fit_in_world, strategy="ddp", steps=1, eval_data=data(9), metrics=metrics)
    with pytest.raises(ConfigError, match=r"metrics\['right'\] is a Unmerged, of which it is not"):
        world_pool(2).run(task, tmp_path / "two")


@pytest.mark.parametrize("num_samples", [1, 9])
def test_metrics_where_ranks_have_seen_unequally_much(
    world_pool: WorldPools, tmp_path: Path, num_samples: int
):
    """Lists of states are longer on one rank than on the other, or empty on one."""
    metrics: dict[str, Any] = {
        "accuracy": torchmetrics.Accuracy("multiclass", num_classes=3),
        "area": torchmetrics.AUROC("multiclass", num_classes=3),
        "composed": 2 * torchmetrics.Accuracy("multiclass", num_classes=3),
        "pieces": Pieces(),
        "merged": Merged(),
        "ours": accuracy,
    }
    task = partial(
        fit_in_world, strategy="ddp", steps=1, eval_data=data(num_samples), metrics=metrics
    )
    found = [result.metrics for result in world_pool(2).run(task, tmp_path)]
    assert found[0] == found[1]
    alone = fit(
        build(),
        data(),
        **settings(tmp_path / "alone", steps=1, eval_data=data(num_samples), metrics=metrics),
    )
    assert found[0] == pytest.approx(alone.metrics, rel=1e-5)


class Unsteady(Net):
    """Gives another output each time, on one rank."""

    runs, unsteady = 0, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Unsteady.runs += not self.training
        return super().forward(x) + (torch.rand(()) if self.unsteady else 0.0)


@pytest.mark.parametrize(("unsteady", "runs"), [(False, 4), (True, 6)])
def test_ranks_agree_on_running_the_model_once_in_an_evaluation(
    world_pool: WorldPools, tmp_path: Path, unsteady: bool, runs: int
):
    """Passes through a divided model are collective: a rank that ran it alone would wait."""

    def task(placement: Placement) -> int:
        torch.manual_seed(1)
        Unsteady.runs, Unsteady.unsteady = 0, unsteady and placement.rank == 1
        fit_in_world(
            placement,
            tmp_path,
            Unsteady(),
            strategy="fsdp",
            steps=1,
            eval_data=DataLoader(data(12), batch_size=4),
            metrics={"accuracy": accuracy},
        )
        return Unsteady.runs

    assert world_pool(2).run(task) == [runs, runs]


class ActsAtTheEnd(Callback):
    """Does something with the model, or a part of it, after the last step."""

    every_rank = True

    def __init__(self, part: str, act: Callable[[nn.Module], Any]) -> None:
        self.part, self.act = part, act

    def on_step_end(self, run: RunInfo, record: StepRecord) -> None:
        assert run.engine is not None
        if record.step == run.total_steps:
            self.act(run.engine.module.get_submodule(self.part))


@pytest.mark.parametrize("part", ["", "blocks.0"], ids=["model", "block"])
@pytest.mark.parametrize(
    ("act", "said"),
    [
        (copy.deepcopy, r"deepcopy.*'fsdp'.*save a.*unipar.load_model\(path, mod"),
        (pickle.dumps, r"pickled.*'fsdp'.*save a.*unipar.load_model\(path, mod"),
        (nn.Module.half, "weight' would be converted.*from torch.float32 on cpu to torch.float16"),
    ],
)
def test_a_divided_model_says_how_to_have_it_whole(
    world_pool: WorldPools, tmp_path: Path, part: str, act: Callable[[nn.Module], Any], said: str
):
    acts = ActsAtTheEnd(part, act)
    task = partial(fit_in_world, directory=tmp_path, callbacks=[acts], steps=1)
    with pytest.raises(ConfigError, match=said):
        world_pool(2).run(partial(task, strategy="fsdp"))
    world_pool(2).run(partial(task, strategy="ddp"))


def is_where_it_is(module: nn.Module) -> None:
    assert module.cpu() is module.to("cpu") is module.float() is module


def test_a_divided_model_may_be_moved_to_where_it_is(world_pool: WorldPools, tmp_path: Path):
    acts = ActsAtTheEnd("", is_where_it_is)
    for strategy in ("ddp", "fsdp"):
        given = {"directory": tmp_path, "callbacks": [acts], "steps": 1, "strategy": strategy}
        world_pool(2).run(partial(fit_in_world, **given))


class ReadsCheckpoints(Callback):
    def on_checkpoint(self, run: RunInfo, step: int, path: Path) -> None:
        model = Net()
        load_model(path, model)
        torch.save(model.state_dict(), path.parent.parent / "seen.pt")


def test_a_callback_reads_the_whole_model_from_a_checkpoint(world_pool: WorldPools, tmp_path: Path):
    task = partial(fit_in_world, directory=tmp_path, strategy="fsdp", checkpoint={})
    world_pool(2).run(partial(task, callbacks=[ReadsCheckpoints()]))
    _, trained = reference()
    for name, tensor in torch.load(tmp_path / "seen.pt").items():
        torch.testing.assert_close(tensor, trained.state_dict()[name], rtol=1e-4, atol=1e-6)
