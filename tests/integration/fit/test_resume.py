"""Checkpoints of a run, and going on from them as if nothing had happened."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import build, data, loss_fn, make_scheduler, reference
from torch.utils.data import DataLoader

from unipar import Callback, RunResult
from unipar.checkpoint import read_manifest
from unipar.checkpoint.manifest import MANIFEST, encode
from unipar.errors import CheckpointError, ConfigError, NonFiniteLossError

Run = Callable[..., RunResult]


class StopAt(Callback):
    """As a user's own error in the middle of a run."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: Any, record: Any) -> None:
        if record.step == self.step:
            raise RuntimeError("stopped")


def saved(directory: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in directory.glob("*/step-*"))


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
@pytest.mark.parametrize("background", [False, True], ids=["waits", "async"])
def test_a_resumed_run_ends_as_the_undisturbed_one(run: Run, strategy: str, background: bool):
    """With a scheduler, dropout, and a break in the middle of an epoch."""
    settings: dict[str, Any] = {"strategy": strategy, "lr_scheduler": make_scheduler}
    whole = run(build(0.4), steps=7, output_dir=Path("unused"), **settings)
    checkpoint = {"every_steps": 3, "async": background, "keep_last": None}
    first = run(build(0.4), steps=6, checkpoint=checkpoint, **settings)
    model = build()
    model.outward.reset_parameters()  # What a resumed run begins with does not matter.
    model.dropout.p = 0.4
    rest = run(model, steps=7, checkpoint=checkpoint, resume="auto", **settings)
    assert [r.step for r in rest.history] == [7]
    assert first.losses + rest.losses == pytest.approx(whole.losses, rel=1e-6)
    assert [r.lr for r in rest.history] == [whole.history[-1].lr]


class Announced(Callback):
    """Which step each checkpoint is said to be of."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str]] = []

    def on_checkpoint(self, run: Any, step: int, path: Path) -> None:
        self.seen.append((step, path.name))


@pytest.mark.parametrize("background", [False, True], ids=["waits", "async"])
def test_a_checkpoint_is_announced_with_its_own_step(run: Run, background: bool):
    announced = Announced()
    run(steps=5, checkpoint={"every_steps": 2, "async": background}, callbacks=[announced])
    assert announced.seen == [(n, f"step-{n:08d}") for n in (2, 4, 5)]


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


def test_a_run_is_continued_from_a_path(run: Run, tmp_path: Path):
    checkpoint = {"every_steps": 2, "keep_last": None}
    run(checkpoint=checkpoint)
    path = tmp_path / "run" / "checkpoints" / "step-00000004"
    result = run(resume=path, output_dir=tmp_path / "other")
    assert result.losses == pytest.approx(reference()[0][4:], rel=1e-6)


def test_going_back_is_refused_where_later_steps_would_count(run: Run, tmp_path: Path):
    """Restarted ranks, and the rule of what is kept, go by the highest step that there is."""
    checkpoint = {"every_steps": 2, "keep_last": None}
    run(checkpoint=checkpoint)
    back = tmp_path / "run" / "checkpoints" / "step-00000004"
    with pytest.raises(
        ConfigError, match=r"the newest is step-00000006\), and this one is to"
    ) as e:
        run(checkpoint=checkpoint, resume=back)
    assert "Choose another output_dir, remove what is newer (unipar checkpoints rm)" in str(e.value)
    with pytest.raises(ConfigError, match="the newest is step-00000006"):
        run(checkpoint=checkpoint, resume=copied(back, tmp_path / "elsewhere"))
    shutil.rmtree(back.with_name("step-00000006"))
    result = run(checkpoint=checkpoint, resume=back.parent)
    assert result.losses == pytest.approx(reference()[0][4:], rel=1e-6)
    assert saved(tmp_path / "run") == [2, 4, 6]


def copied(path: Path, directory: Path) -> Path:
    return Path(shutil.copytree(path, directory / path.name))


def test_resume_auto_begins_anew_where_there_is_nothing(run: Run):
    result = run(resume="auto", checkpoint={})
    assert len(result.losses) == 6


@pytest.mark.parametrize("save_final", [True, False])
def test_resuming_a_finished_run_changes_nothing(run: Run, save_final: bool):
    checkpoint = {"every_steps": 6, "save_final": save_final}
    settings: dict[str, Any] = {"checkpoint": checkpoint, "eval_data": data(8), "eval_every": 4}
    first = run(**settings)
    assert first.checkpoint is not None
    written = (first.checkpoint / MANIFEST).stat()
    model = build()
    announced = Announced()
    again = run(model, resume="auto", callbacks=[announced], **settings)
    assert again.losses == again.evaluations == announced.seen == []
    assert again.checkpoint == first.checkpoint
    assert (first.checkpoint / MANIFEST).stat() == written
    assert again.metrics == first.metrics
    assert again.metrics.keys() == {"loss", "train_loss"}
    torch.testing.assert_close(model.state_dict(), reference()[1].state_dict())


def test_runs_of_the_same_second_have_a_directory_each(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda *args: "now")
    runs = [run(steps=1, checkpoint={}, output_dir=None) for _ in range(3)]
    assert [one.output_dir.name for one in runs] == ["now-single", "now-single-2", "now-single-3"]


def test_a_used_directory_is_refused(run: Run):
    run(steps=1, checkpoint={})
    with pytest.raises(ConfigError, match=r"holds checkpoints of an earlier run .*step-00000001"):
        run(steps=1, checkpoint={})


def test_resume_auto_needs_a_directory(run: Run):
    with pytest.raises(ConfigError, match=r"resume='auto'.*set output_dir="):
        run(resume="auto", checkpoint={}, output_dir=None)


def test_a_path_that_is_no_checkpoint_is_refused_before_any_process_starts(
    run: Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("unipar.launch.run", lambda *_, **__: pytest.fail("processes were started"))
    with pytest.raises(CheckpointError, match=r"nowhere is no checkpoint.*does not exist"):
        run(resume="nowhere", strategy="ddp", devices=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_batch_size": 4}, r"made with global_batch_size=8, and this run has .*=4"),
        ({"seed": 5}, r"made with seed=0, and this run has seed=5.*Set seed=0"),
        ({"shuffle": False}, r"made with shuffle=True, .* shuffle=False.*Set shuffle=True"),
        (
            {"samples": data(20)},
            r"made with 28 samples of data, and this run has 20.*Give the same.*load_model",
        ),
        (
            {"samples": DataLoader(data(), batch_size=8, shuffle=True, drop_last=True)},
            r"made with drop_last=False, .* drop_last=True.*DataLoader with drop_last=False",
        ),
    ],
)
@pytest.mark.parametrize("steps", [2, 4], ids=["within an epoch", "between epochs"])
def test_a_checkpoint_of_another_order_is_refused(
    run: Run, steps: int, change: dict[str, Any], message: str
):
    run(steps=steps, checkpoint={})
    with pytest.raises(ConfigError, match=message):
        run(checkpoint={}, resume="auto", **change)


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.02, momentum=0.9)


def cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        (
            {"lr_scheduler": make_scheduler},
            {},
            r"made with a learning-rate scheduler \(StepLR\), and this run has none.*Pass the same",
        ),
        (
            {},
            {"lr_scheduler": make_scheduler},
            r"made without a learning-rate scheduler, and this run has one \(StepLR\), which would "
            r"begin at its first step. Leave lr_scheduler out",
        ),
        (
            {"lr_scheduler": make_scheduler},
            {"lr_scheduler": cosine},
            r"with the lr_scheduler StepLR, and this run has CosineAnnealingLR",
        ),
        ({}, {"optimizer": sgd}, r"with the optimizer AdamW, and this run has SGD"),
    ],
)
def test_another_optimizer_or_scheduler_is_refused(
    run: Run, first: dict[str, Any], then: dict[str, Any], message: str
):
    run(steps=2, checkpoint={}, **first)
    with pytest.raises(ConfigError, match=message):
        run(checkpoint={}, resume="auto", **then)


def test_what_the_checkpoint_puts_in_place_of_what_is_given_is_said(
    run: Run, caplog: pytest.LogCaptureFixture
):
    def step_lr(gamma: float) -> Any:
        return {"name": "steplr", "step_size": 2, "gamma": gamma}

    before = {"name": "adamw", "lr": 0.02}
    run(steps=2, checkpoint={}, optimizer=before, lr_scheduler=step_lr(0.5))
    run(steps=3, checkpoint={}, optimizer=before, lr_scheduler=step_lr(0.5), resume="auto")
    assert "not those given" not in caplog.text
    run(
        steps=4,
        checkpoint={},
        optimizer={"name": "adamw", "lr": 0.03, "betas": [0.8, 0.9]},
        lr_scheduler=step_lr(0.1),
        resume="auto",
    )
    for said in (
        "step-00000003 goes on with its own values, not those given now: ",
        "betas is (0.9, 0.999) (given: (0.8, 0.9))",
        "gamma of lr_scheduler is 0.5 (given: 0.1)",
        "initial_lr is 0.02 (given: 0.03)",
    ):
        assert said in caplog.text


def test_a_rate_that_a_plateau_has_lowered_is_not_said_to_be_another(
    run: Run, caplog: pytest.LogCaptureFixture
):
    plateau = {"name": "reducelronplateau", "patience": 0, "threshold": 10.0}
    same: dict[str, Any] = {"checkpoint": {}, "lr_scheduler": plateau, "eval_data": data()}

    def adamw(lr: float) -> dict[str, Any]:
        return {"name": "adamw", "lr": lr}

    run(steps=2, eval_every=1, optimizer=adamw(0.02), **same)
    rest = run(steps=3, eval_every=1, optimizer=adamw(0.02), resume="auto", **same)
    assert rest.history[0].lr == pytest.approx(0.0002)
    assert "not those given" not in caplog.text
    run(steps=4, eval_every=1, optimizer=adamw(0.03), resume="auto", **same)
    assert "initial_lr is 0.02 (given: 0.03)" in caplog.text


def test_a_checkpoint_that_does_not_say_its_order_is_taken(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """As those that unipar wrote before it did."""
    run(steps=3, checkpoint={})
    [path] = (tmp_path / "run" / "checkpoints").iterdir()
    manifest = read_manifest(path)
    loader = {"epoch": 0, "index": 3, "stream": None}
    older = {"loader": loader, "seed": 0, "global_batch_size": 8}
    (path / MANIFEST).write_bytes(encode(dataclasses.replace(manifest, progress=older)))
    caplog.set_level("INFO")
    result = run(checkpoint={}, resume="auto")
    assert result.losses == pytest.approx(reference()[0][3:], rel=1e-6)
    assert "does not say its num_samples, shuffle, drop_last, which is not checked" in caplog.text


def test_micro_batches_may_change_at_a_resume(run: Run):
    run(steps=3, checkpoint={})
    result = run(checkpoint={}, resume="auto", micro_batch_size=2)
    assert result.losses == pytest.approx(reference()[0][3:], rel=1e-5)


def test_the_last_few_and_the_best_are_kept(run: Run, tmp_path: Path):
    def worst_at_the_end(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.tensor(float(next(scores)))

    scores = iter([3.0, 1.0, 2.0, 4.0, 5.0, 6.0])
    run(
        eval_data=data(8),
        eval_every=1,
        metrics={"score": worst_at_the_end},
        checkpoint={
            "every_steps": 1,
            "keep_last": 2,
            "keep_best": {"metric": "score", "mode": "min"},
        },
    )
    assert saved(tmp_path / "run") == [2, 5, 6]


def test_the_best_is_known_where_evaluation_comes_at_the_epochs_end(run: Run, tmp_path: Path):
    """Four steps are an epoch, and the evaluation data is one batch."""
    scores = iter([2.0, 5.0, 1.0])
    run(
        eval_data=data(8),
        metrics={"score": lambda predictions, targets: torch.tensor(next(scores))},
        epochs=3,
        steps=...,
        checkpoint={
            "every_steps": 2,
            "keep_last": 1,
            "keep_best": {"metric": "score", "mode": "max"},
        },
    )
    assert saved(tmp_path / "run") == [8, 12]


def test_the_best_is_saved_where_it_is_evaluated(run: Run, tmp_path: Path):
    """Saves by steps never meet evaluations; and what is best is known in a run that goes on."""
    scores = iter([3.0, 1.0, 2.0, 0.5, 4.0, 0.7])
    settings: dict[str, Any] = {
        "eval_data": data(8),
        "eval_every": 3,
        "metrics": {"score": lambda predictions, targets: torch.tensor(next(scores))},
        "checkpoint": {
            "every_steps": 5,
            "keep_last": 1,
            "keep_best": {"metric": "score"},
        },
    }
    run(steps=10, **settings)
    # At 6 it is 1.0, and 0.5 at the end, at 10.
    assert saved(tmp_path / "run") == [10]
    run(steps=13, resume="auto", **settings)
    assert saved(tmp_path / "run") == [10, 13]


def test_the_best_is_known_at_the_last_step_too(run: Run, tmp_path: Path):
    """Its evaluation is due because it is the last, and comes before its checkpoint."""
    scores = iter([5.0, 1.0])
    run(
        eval_data=data(8),
        eval_every=4,
        metrics={"score": lambda predictions, targets: torch.tensor(next(scores))},
        checkpoint={"every_steps": 2, "keep_last": None, "keep_best": {"metric": "score"}},
    )
    last = tmp_path / "run" / "checkpoints" / "step-00000006"
    assert read_manifest(last).metrics["score"] == 1.0


def test_a_checkpoint_is_due_by_the_clock(run: Run, tmp_path: Path):
    run(checkpoint={"every_minutes": 1e-9, "keep_last": None, "save_final": False})
    assert saved(tmp_path / "run") == [1, 2, 3, 4, 5, 6]


def test_nothing_is_saved_at_the_end_where_that_is_not_wanted(run: Run, tmp_path: Path):
    model = build()
    result = run(model, strategy="fsdp", checkpoint={"every_steps": 4, "save_final": False})
    assert saved(tmp_path / "run") == [4]
    assert result.checkpoint is not None
    torch.testing.assert_close(
        model.state_dict(), reference()[1].state_dict(), rtol=1e-4, atol=1e-6
    )


def test_a_run_that_failed_goes_on_from_its_newest_checkpoint(run: Run, tmp_path: Path):
    checkpoint = {"every_steps": 2}
    with pytest.raises(RuntimeError, match="stopped"):
        run(checkpoint=checkpoint, callbacks=[StopAt(5)])
    result = run(checkpoint=checkpoint, resume="auto")
    assert [r.step for r in result.history] == [5, 6]
    assert result.losses == pytest.approx(reference()[0][4:], rel=1e-6)


def test_a_loss_that_is_not_finite_stops_the_run_with_its_checkpoints_kept(
    run: Run, tmp_path: Path
):
    calls = iter(range(100))

    def explodes(model: Any, batch: Any) -> torch.Tensor:
        return loss_fn(model, batch) * (float("nan") if next(calls) == 4 else 1)

    model = build()
    with pytest.raises(NonFiniteLossError, match=r"loss of step 5 is not finite") as caught:
        run(model, loss=explodes, checkpoint={"every_steps": 2})
    assert caught.value.step == 5
    torch.testing.assert_close(model.state_dict(), reference(4)[1].state_dict())
    assert saved(tmp_path / "run") == [2, 4]


def test_batches_that_explode_are_left_out_if_asked(run: Run):
    calls = iter(range(100))

    def explodes(model: Any, batch: Any) -> torch.Tensor:
        return loss_fn(model, batch) * (float("inf") if next(calls) == 1 else 1)

    result = run(loss=explodes, on_nan="skip", steps=3)
    assert [r.skipped for r in result.history] == [False, True, False]
    assert result.losses[0] == pytest.approx(reference()[0][0])
    assert torch.isfinite(torch.tensor(result.losses[2]))


def test_or_ignored(run: Run):
    def explodes(model: Any, batch: Any) -> torch.Tensor:
        return loss_fn(model, batch) * float("nan")

    result = run(loss=explodes, on_nan="ignore", steps=2)
    assert all(loss != loss for loss in result.losses)
