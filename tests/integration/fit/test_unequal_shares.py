"""``shares``: ranks that take unequal parts train the run that a plain loop trains."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import BATCH, SAMPLES, build, data, fit_in_world, make_adamw
from torch import nn
from torch.utils.data import DataLoader

from unipar import LossSum, RunResult, Session
from unipar.checkpoint import load_model
from unipar.data.order import epoch_order
from unipar.errors import ConfigError
from unipar.testing.pool import WorldPools
from unipar.world import Placement

pytestmark = pytest.mark.slow

STEPS, CLIP = 6, 0.5
"""The fourth batch is ragged: of 4 samples, of which ranks have 3 and 1."""


def mean(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def of_some(model: Any, batch: Any) -> LossSum:
    """A sum over the samples of two classes of three; micro-batches hold unequal numbers."""
    labels = batch[1].masked_fill(batch[1] == 1, -100)
    total = nn.functional.cross_entropy(model(batch[0]), labels, reduction="sum")
    return LossSum(total, (labels != -100).sum())


LOSSES = {"mean": mean, "sum": of_some}


@functools.cache
def expected(loss: str) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms and weights of a plain loop over whole global batches."""
    model, losses, norms = build(), [], []
    optimizer = make_adamw(model.named_parameters())
    for epoch in range(2):
        order = epoch_order(SAMPLES, seed=0, epoch=epoch, shuffle=True)
        for indices in order.split(BATCH)[: STEPS - len(losses)]:
            inputs, labels = data()[indices]
            if loss == "sum":
                labels = labels.masked_fill(labels == 1, -100)
            value = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            value.backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
            optimizer.step()
            losses.append(value.item())
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


def assert_equals_the_plain_loop(result: RunResult, loss: str, *, resumed_at: int = 0) -> None:
    losses, norms, weights = expected(loss)
    found = [record.grad_norm for record in result.history]
    assert result.history.losses == pytest.approx(losses[resumed_at:], rel=1e-5)
    assert found == pytest.approx(norms[resumed_at:], rel=1e-5)
    model = build()
    assert result.checkpoint is not None
    load_model(result.checkpoint, model)
    for name, parameter in model.named_parameters():
        difference = (parameter.detach() - weights[name]).abs().max()
        assert difference <= 1e-5 * weights[name].abs().max(), name


def train(placement: Placement, directory: Path, loss: str, **changes: Any) -> RunResult:
    return fit_in_world(
        placement,
        directory,
        loss=LOSSES[loss],
        max_grad_norm=CLIP,
        steps=STEPS,
        checkpoint={"every_steps": 2, "keep_last": None},
        **changes,
    )


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_unequal_shares_train_the_run_of_a_plain_loop(
    strategy: str, loss: str, tmp_path: Path, world_pool: WorldPools
) -> None:
    settings = {"strategy": strategy, "shares": [3, 1], "micro_batch_size": 2}
    result = world_pool(2).run(functools.partial(train, **settings), tmp_path, loss)[0]
    assert_equals_the_plain_loop(result, loss)


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="under fsdp no pass is tried with an older torch"
)
def test_a_micro_batch_that_fits_is_found_for_each_share(
    tmp_path: Path, world_pool: WorldPools
) -> None:
    settings = {"strategy": "fsdp", "shares": [3, 1], "micro_batch_size": "auto"}
    result = world_pool(2).run(functools.partial(train, **settings), tmp_path, "sum")[0]
    assert_equals_the_plain_loop(result, "sum")


@pytest.mark.parametrize(("before", "after"), [([3, 1], None), (None, [1, 3])])
def test_a_run_resumes_with_other_shares(
    before: Any, after: Any, tmp_path: Path, world_pool: WorldPools
) -> None:
    run = world_pool(2).run
    first = functools.partial(train, strategy="fsdp", shares=before)
    run(first, tmp_path / "first", "sum")
    # Within the first epoch, which has four steps.
    resume = tmp_path / "first" / "checkpoints" / "step-00000002"
    second = functools.partial(train, strategy="ddp", shares=after, resume=resume)
    result = run(second, tmp_path / "second", "sum")[0]
    assert_equals_the_plain_loop(result, "sum", resumed_at=2)


def sizes(placement: Placement) -> list[int]:
    with Session("ddp", device="cpu", placement=placement) as session:
        loader = session.loader(data(), global_batch_size=8, micro_batch_size=3, shares=[3, 1])
        return [micro.num_samples for micro in next(iter(loader))]


def test_a_loop_of_ones_own_asks_its_loader(world_pool: WorldPools) -> None:
    assert world_pool(2).run(sizes) == [[3, 3], [1, 1]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": 2, "shares": [2, 1, 1]}, r"3 number\(s\).*among 2 .*Give 2"),
        ({"devices": 2, "shares": [99, 1]}, r"rank 1 none of the 8 .*global_batch_size to 100"),
        ({"devices": 2, "shares": [3, 1], "strategy": "mesh:tp=2"}, r"among 1 .*tp, pp or cp"),
        ({"shares": [3, 1]}, r"among 1 data-parallel.*shares=\[1\]"),
    ],
)
def test_what_cannot_be_divided_so_is_refused_before_any_process(
    run: Callable[..., RunResult], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(**{"strategy": "ddp" if "devices" in changes else "single", **changes})


def normed() -> nn.Module:
    """Its statistics are over pixels too, so that one sample is no error."""
    norm = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.BatchNorm2d(1), nn.Flatten())
    return nn.Sequential(norm, build())


def test_a_model_in_evaluation_mode_is_told_of(
    run: Callable[..., RunResult], caplog: pytest.LogCaptureFixture
) -> None:
    partly = nn.Sequential(nn.BatchNorm1d(4).eval(), build())
    run(partly, strategy="single", steps=1)
    assert "evaluation mode" not in caplog.text
    run(partly.eval(), strategy="single", steps=1)
    assert "Sequential is in evaluation mode, as from_pretrained() and eval()" in caplog.text
    assert not any(one.training for one in partly.modules())


def test_batch_norm_gets_no_sample_alone_that_need_not_be(
    run: Callable[..., RunResult], caplog: pytest.LogCaptureFixture
) -> None:
    alone = nn.Sequential(nn.BatchNorm1d(4), build())
    # Of seven and one the one would be an error of BatchNorm's.
    run(alone, strategy="single", micro_batch_size=7, steps=2)
    assert "BatchNorm" not in caplog.text
    run(normed(), strategy="single", global_batch_size=3, micro_batch_size=1, steps=1)
    assert "BatchNorm" not in caplog.text
    run(normed(), strategy="single", global_batch_size=3, micro_batch_size=2, steps=1)
    assert (
        "BatchNorm gets single samples to learn from: a rank has 3 of the 3 samples of a global "
        "batch, in 2 micro-batches. Raise global_batch_size or micro_batch_size"
    ) in caplog.text
    caplog.clear()
    # All are 4 times 8 and 1 more.
    run(normed(), data(33), strategy="single", steps=1)
    assert (
        "a rank has 1 of the 1 samples of an epoch's last batch, in 1 micro-batch. Leave it out: "
        "give a DataLoader with drop_last=True."
    ) in caplog.text
    caplog.clear()
    whole = DataLoader(data(33), batch_size=8, drop_last=True)
    run(normed(), whole, strategy="single", steps=1)
    assert "BatchNorm" not in caplog.text
