"""A mean that is not over samples is told of where ranks or micro-batches divide a batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from told import warned_of
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from unipar import LossSum, Objective, Session
from unipar.testing.pool import WorldPools
from unipar.world import Placement

pytestmark = pytest.mark.slow

SAMPLES, BATCH, LENGTH, KINDS = 16, 8, 12, 5
IGNORED = -100


def data() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    xs = torch.randn(SAMPLES, LENGTH, 6, generator=draw)
    labels = torch.randint(KINDS, (SAMPLES, LENGTH), generator=draw)
    lengths = torch.randint(2, LENGTH, (SAMPLES, 1), generator=draw)
    return list(zip(xs, labels, (torch.arange(LENGTH) < lengths).float(), strict=True))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, KINDS))


def sgd(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def entropy(model: Any, batch: Any, **how: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), **how)


def each(model: Any, batch: Any) -> torch.Tensor:
    return entropy(model, batch, reduction="none").view(-1, LENGTH)


def masked(model: Any, batch: Any) -> torch.Tensor:
    return (each(model, batch) * batch[2]).sum() / batch[2].sum()


def masked_first(model: Any, batch: Any) -> torch.Tensor:
    return (each(model, batch) * batch[2] / batch[2].sum().clamp(min=1)).sum()


def masked_by_number(model: Any, batch: Any) -> torch.Tensor:
    return 0.5 * (each(model, batch) * batch[2]).sum() / int(batch[2].sum())


def chosen(model: Any, batch: Any) -> torch.Tensor:
    return each(model, batch)[batch[2] > 0].mean() + 0.1 * each(model, batch).mean()


def chosen_errors(model: Any, batch: Any) -> torch.Tensor:
    output = model(batch[0])[batch[2] > 0]
    return functional.mse_loss(output, torch.zeros_like(output))


def ignoring(model: Any, batch: Any) -> torch.Tensor:
    labels = batch[1].masked_fill(batch[2] == 0, IGNORED)
    return entropy(model, (batch[0], labels))


def ignoring_smooth(model: Any, batch: Any) -> torch.Tensor:
    labels = batch[1].masked_fill(batch[2] == 0, IGNORED)
    return entropy(model, (batch[0], labels), label_smoothing=0.1)


def of_classes(model: Any, batch: Any) -> torch.Tensor:
    return entropy(model, batch, weight=torch.arange(1.0, KINDS + 1))


def small(model: Any, batch: Any) -> torch.Tensor:
    return masked(model, batch) * 1e-12


def sums(model: Any, batch: Any) -> torch.Tensor:
    return each(model, batch).mean(1).sum()


def sum_and_factor(model: Any, batch: Any) -> torch.Tensor:
    return sums(model, batch) - 0.5 * model(batch[0]).sum()


def sum_and_mean(model: Any, batch: Any) -> torch.Tensor:
    return mean(model, batch) + entropy(model, batch, reduction="sum")


def mean(model: Any, batch: Any) -> torch.Tensor:
    return entropy(model, batch)


def smooth(model: Any, batch: Any) -> torch.Tensor:
    return entropy(model, batch, label_smoothing=0.1)


def of_each_sample(model: Any, batch: Any) -> torch.Tensor:
    return ((each(model, batch) * batch[2]).sum(1) / batch[2].sum(1)).mean()


def sum_by_samples(model: Any, batch: Any) -> torch.Tensor:
    return each(model, batch).sum() / len(batch[0])


def sum_by_batch(model: Any, batch: Any) -> torch.Tensor:
    return 0.5 * each(model, batch).mean(1).sum() / BATCH


def sum_of_shares(model: Any, batch: Any) -> torch.Tensor:
    return (each(model, batch).mean(1) / BATCH).sum() + 1e-3 * model(batch[0]).square().mean()


def sum_by_factor(model: Any, batch: Any) -> torch.Tensor:
    return (1 / len(batch[0])) * each(model, batch).mean(1).sum()


def penalized(model: Any, batch: Any) -> torch.Tensor:
    return mean(model, batch) + 1e-2 * sum(p.square().sum() for p in model.parameters())


def by_all(model: Any, batch: Any) -> torch.Tensor:
    number = batch[2].sum()
    torch.distributed.all_reduce(number)
    return (each(model, batch) * batch[2]).sum() / (number / torch.distributed.get_world_size())


class Div(torch.autograd.Function):
    """Has the name of torch's own in its graph, and keeps nothing."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss / 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] / 2


def means_by_sums(model: Any, batch: Any) -> torch.Tensor:
    whole = entropy(model, batch, reduction="sum")
    return mean(model, batch) + whole / batch[1].numel() + (1 / len(batch[0])) * whole


def by_own_function(model: Any, batch: Any) -> torch.Tensor:
    loss = Div.apply(mean(model, batch))
    assert isinstance(loss, torch.Tensor)
    return loss


def summed(model: Any, batch: Any) -> LossSum:
    return LossSum((each(model, batch) * batch[2]).sum(), batch[2].sum())


COUNTED = Objective(
    lambda batch: batch[0],
    lambda output, batch: (
        (
            (functional.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="none"))
            * batch[2].flatten()
        ).sum()
        / batch[2].sum()
    ),
    lambda batch: batch[2].sum(),
)


def told(
    placement: Placement, strategy: str, losses: list[Any], size: int, precision: Any = "fp32"
) -> list[list[str]]:
    """What a rank warns of in two steps by each loss."""
    found = []
    for loss in losses:
        options: dict[str, Any] = {"placement": placement, "precision": precision}
        with warned_of() as said, Session(strategy, device="cpu", **options) as session:
            engine = session.prepare(build(), optimizer=sgd)
            loader = session.loader(
                data(), global_batch_size=BATCH, micro_batch_size=size, shuffle=False
            )
            for batch in loader:
                engine.train_step(batch, loss)
        found.append(said)
    return found


WRONG = [
    masked, masked_first, masked_by_number, chosen, chosen_errors, ignoring, ignoring_smooth,
    of_classes, small,
]  # fmt: skip
RIGHT = [
    mean,
    smooth,
    of_each_sample,
    sum_by_samples,
    sum_by_factor,
    means_by_sums,
    by_own_function,
    summed,
    COUNTED,
]


@pytest.mark.parametrize(
    ("ranks", "strategy", "precision"),
    [(2, "ddp", "fp32"), (2, "fsdp", "bf16"), (1, "single", "bf16"), (2, "zero2", "fp32")],
)
def test_rank_0_tells_once_of_a_mean_that_is_not_over_samples(
    world_pool: WorldPools, ranks: int, strategy: str, precision: Any
) -> None:
    first, *others = world_pool(ranks).run(told, strategy, WRONG, BATCH // 2, precision)
    for loss, said in zip(WRONG, first, strict=True):
        assert len(said) == 1, loss.__name__
        assert said[0].startswith("the loss is divided by ")
        assert "in a part of the batch with 4 samples, and by" in said[0]
        assert "Return unipar.LossSum(sum, number of items)" in said[0]
    assert others in ([], [[[]] * len(WRONG)])


@pytest.mark.parametrize(
    ("ranks", "strategy", "losses"),
    [(2, "ddp", [*RIGHT, penalized, by_all]), (2, "fsdp", RIGHT), (1, "single", RIGHT)],
)
def test_what_does_not_depend_on_parts_is_not_told_of(
    world_pool: WorldPools, ranks: int, strategy: str, losses: list[Any]
) -> None:
    for found in world_pool(ranks).run(told, strategy, losses, BATCH // 2):
        assert found == [[]] * len(losses)


def test_one_part_is_not_told_of(world_pool: WorldPools) -> None:
    assert world_pool(1).run(told, "single", [*WRONG, sums], BATCH) == [[[]] * (len(WRONG) + 1)]


@pytest.mark.parametrize(
    ("losses", "said_of"),
    [
        (
            [sums, sum_and_factor, sum_and_mean],
            "the loss is or has a sum over samples, and counts as a mean over them",
        ),
        (
            [sum_by_batch, sum_of_shares],
            "a sum over samples that is divided by 8, which is how many the whole",
        ),
    ],
)
def test_a_sum_over_samples_is_told_of(
    world_pool: WorldPools, losses: list[Any], said_of: str
) -> None:
    first, second = world_pool(2).run(told, "ddp", losses, BATCH // 2)
    for loss, said in zip(losses, first, strict=True):
        assert len(said) == 1, loss.__name__
        assert said_of in said[0]
    assert second == [[]] * len(losses)


def computed_again(placement: Placement) -> int:
    """How often a checkpointed loss is computed in one step."""
    calls: list[int] = []

    def of_output(output: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return (output.square().sum(-1) * weights).sum() / weights.sum()

    def loss(model: Any, batch: Any) -> Any:
        return checkpoint(of_output, model(batch[0]), batch[2], use_reentrant=False)

    with Session("ddp", device="cpu", placement=placement) as session:
        engine = session.prepare(build(), optimizer=sgd)
        engine.train_step(next(iter(session.loader(data(), global_batch_size=BATCH))), loss)
    return len(calls)


@pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "unpack_hook"),  # pyright: ignore[reportAttributeAccessIssue]
    reason="this torch does not tell what has to be computed again",
)
def test_a_checkpointed_loss_is_not_computed_to_be_read(world_pool: WorldPools) -> None:
    assert world_pool(2).run(computed_again) == [2, 2]
