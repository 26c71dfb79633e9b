"""A ``ReduceLROnPlateau`` is stepped at evaluations, under every strategy as in a plain loop."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import (
    BATCH,
    SAMPLES,
    accuracy,
    build,
    data,
    fit_in_world,
    loss_fn,
    make_adamw,
    settings,
)
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from unipar import Session, fit
from unipar.data.order import epoch_order
from unipar.errors import ConfigError
from unipar.testing.pool import WorldPools

STEPS, EVALUATED = 8, 12


def on_plateau(optimizer: Optimizer) -> ReduceLROnPlateau:
    # The small run gets better by less than this in some evaluations, and by more in others.
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.05)


def plain() -> tuple[list[float], list[float]]:
    """Losses and learning rates of a loop that steps the scheduler with its evaluation's loss."""
    model = build()
    optimizer = make_adamw(model.named_parameters())
    schedule = on_plateau(optimizer)
    losses: list[float] = []
    rates: list[float] = []
    order = [
        part
        for epoch in range(2)
        for part in epoch_order(SAMPLES, seed=0, epoch=epoch, shuffle=True).split(BATCH)
    ]
    for indices in order[:STEPS]:
        rates.append(optimizer.param_groups[0]["lr"])
        loss = loss_fn(model, data()[indices])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        with torch.no_grad():
            schedule.step(loss_fn(model, data(EVALUATED)[:]).item())
    return losses, rates


@pytest.mark.parametrize("strategy", ["ddp", "ddp:shard_optimizer=true", "fsdp"])
def test_the_learning_rate_falls_as_in_a_plain_loop(
    world_pool: WorldPools, tmp_path: Path, strategy: str
) -> None:
    """The second half of the run resumes the first."""
    losses, rates = plain()
    assert 2 < len(set(rates)) < STEPS
    task = partial(
        fit_in_world,
        directory=tmp_path,
        strategy=strategy,
        lr_scheduler=on_plateau,
        eval_data=data(EVALUATED),
        eval_every=1,
        checkpoint={},
        resume="auto",
    )
    halves = [world_pool(2).run(partial(task, steps=steps)) for steps in (STEPS // 2, STEPS)]
    for first, second in zip(*halves, strict=True):
        records = [*first.history, *second.history]
        assert [record.lr for record in records] == rates
        assert [record.loss for record in records] == pytest.approx(losses, rel=1e-5)


def test_a_mapping_names_the_metric(run: Any) -> None:
    plateau = {"name": "reducelronplateau", "metric": "never", "mode": "max", "patience": 1}
    result = run(
        lr_scheduler=plateau,
        eval_data=data(8),
        eval_every=1,
        metrics={"never": lambda predictions, targets: torch.zeros(())},
    )
    rates = [record.lr for record in result.history]
    assert rates == pytest.approx([0.02, 0.02, 0.02, 0.002, 0.002, 2e-4])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"lr_scheduler": "reducelronplateau"},
            r"lr_scheduler goes by the evaluation metric 'loss', and nothing is evaluated. Pass e",
        ),
        (
            {"lr_scheduler": on_plateau},
            r"goes by the evaluation metric 'loss', and nothing is eval",
        ),
        (
            {
                "lr_scheduler": {"name": "reducelronplateau", "metric": "acuracy"},
                "eval_data": data(8),
                "metrics": {"accuracy": accuracy},
            },
            r"'acuracy', which is no .*Did you mean 'accuracy'\? Known: loss, accuracy",
        ),
    ],
)
def test_a_plateau_of_what_is_not_evaluated_is_refused(
    run: Any, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        run(**changes)


def test_ones_own_loop_steps_it() -> None:
    with Session("single", device="cpu") as session:
        engine = session.prepare(build(), optimizer=make_adamw, lr_scheduler=on_plateau)
        rates: list[float] = []
        for batch in session.loader(data(), global_batch_size=BATCH):
            assert engine.optimizer is not None
            rates.append(engine.optimizer.param_groups[0]["lr"])
            engine.train_step(batch, loss_fn)
            scheduler: Any = engine.lr_scheduler
            scheduler.step(1.0)
    assert rates == pytest.approx([0.02, 0.02, 0.01, 0.005])


def test_a_run_that_goes_on_is_the_longer_run(tmp_path: Path) -> None:
    """An evaluation that is due because the run ends is none of the scheduler's."""
    plateau: dict[str, Any] = {
        "strategy": "single",
        "eval_data": data(EVALUATED),
        "eval_every": 2,
        "lr_scheduler": on_plateau,
        "checkpoint": {},
        "resume": "auto",
    }
    whole = fit(build(), data(), **settings(tmp_path / "whole", steps=8, **plateau))
    fit(build(), data(), **settings(tmp_path / "parts", steps=3, **plateau))
    rest = fit(build(), data(), **settings(tmp_path / "parts", steps=8, **plateau))
    assert [record.step for record in rest.history] == [4, 5, 6, 7, 8]
    rates = [record.lr for record in whole.history]
    assert [record.lr for record in rest.history] == rates[3:]
    assert len(set(rates)) > 1
    assert rest.losses == whole.losses[3:]
