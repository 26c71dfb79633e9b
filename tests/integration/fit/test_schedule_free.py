"""Schedule-free optimizers: a run steps by other weights than those that it evaluates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from schedule_free import ScheduleFree
from small_run import fit_in_world
from torch import nn
from torch.utils.data import TensorDataset

from unipar.testing.pool import WorldPools
from unipar.world import Placement

STEPS = 6
X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


def squared_error(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return (model(x) - y).square().mean()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def built(named: Any) -> ScheduleFree:
    return ScheduleFree([parameter for _, parameter in named])


def plain_loop() -> tuple[list[float], list[float]]:
    """Losses of steps, and of evaluations after the third and the last, of all samples in order."""
    model, evaluated, losses = net(), [], []
    optimizer = ScheduleFree(list(model.parameters()))
    for step in range(STEPS):
        optimizer.train()
        part = slice(step % 3 * 8, step % 3 * 8 + 8)
        loss = squared_error(model, (X[part], Y[part]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 3 == 2:
            optimizer.eval()
            with torch.no_grad():
                evaluated.append(squared_error(model, (X, Y)).item())
    return losses, evaluated


def run(placement: Placement, root: Path, strategy: str, resume: Any = None) -> Any:
    data = TensorDataset(X, Y)
    result = fit_in_world(
        placement, root, net(), samples=data, eval_data=data, loss=squared_error,
        optimizer=built, lr_scheduler=None, strategy=strategy, global_batch_size=8, steps=STEPS,
        shuffle=False, eval_every=3, checkpoint={"every_steps": 2, "keep_last": 3}, resume=resume,
    )  # fmt: skip
    return result.losses, result.metrics["loss"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_evaluates_the_weights_that_the_optimizer_gives_for_it(
    strategy: str, world_pool: WorldPools, tmp_path: Path
) -> None:
    """Nobody but the run knows when it evaluates; a run that goes on steps by the others again."""
    losses, evaluated = plain_loop()
    for told, last in world_pool(2).run(run, tmp_path, strategy):
        assert told == pytest.approx(losses, rel=1e-5)
        assert last == pytest.approx(evaluated[-1], rel=1e-5)
    (halfway,) = tmp_path.rglob("step-00000004")
    for told, last in world_pool(2).run(run, tmp_path / "again", strategy, halfway):
        assert told[-2:] == pytest.approx(losses[4:], rel=1e-5)
        assert last == pytest.approx(evaluated[-1], rel=1e-5)
