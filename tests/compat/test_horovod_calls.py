"""Calls of Horovod's exchange what they exchange there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain_scripts import plainly
from torch import nn

from unipar.compat.horovod import torch as hvd
from unipar.compat.optimizers import zero_unused
from unipar.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def exchanged() -> list[float]:
    hvd.init()
    own = hvd.rank() + 1.0
    found = [
        hvd.allreduce_(torch.tensor([own]), None, "in place", hvd.Sum),
        *hvd.grouped_allreduce_([torch.tensor([own])], None, "grouped", hvd.Sum),
        hvd.synchronize(hvd.allreduce_async(torch.tensor([own]), None, "handle", hvd.Max)),
        # Of numbers above 2048 half precision has the even ones alone.
        hvd.allreduce(torch.tensor([2049.0]), compression=hvd.Compression.fp16),
        hvd.allreduce(torch.tensor([2049.0]), compression=hvd.Compression.none),
    ]
    model = nn.Linear(2, 2)
    model.weight.data.fill_(own)
    # A list need have no names.
    hvd.broadcast_parameters(list(model.parameters()), 1)
    return [one.item() for one in (*found, model.weight[0, 0])]


def test_arguments_stand_where_they_stand_there(world_pool: Any) -> None:
    for found, _ in world_pool(2).run(plainly, "ddp", exchanged):
        assert found == [3.0, 3.0, 2.0, 2048.0, 2049.0, 2.0]


def thawed(between: bool) -> list[float]:
    """One that is thawed before the first pass, and one that is frozen before it and thawed."""
    hvd.init()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(not between)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for one in (between, True):
        model[0].requires_grad_(one)
        model(torch.ones(2, 2)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return []


@pytest.mark.parametrize("between", [True, False])
def test_what_was_frozen_is_as_of_when_the_optimizer_was_wrapped(
    world_pool: Any, between: bool
) -> None:
    (_, told), _ = world_pool(2).run(plainly, "ddp", thawed, between)
    assert [line.split(" when")[0] for line in told] == ["0.bias, 0.weight: frozen"] * between


def test_a_group_of_which_a_strategy_takes_some_has_zeros_of_what_is_trained() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained = [[p.requires_grad for p in model.parameters()]]
    optimizer.param_groups[0]["params"] = list(model[1].parameters())
    zero_unused(optimizer, trained=trained)
    assert all(p.grad is not None for p in model[1].parameters())
    # Those that are added later are none of the framework's.
    late = nn.Linear(2, 2)
    optimizer.add_param_group({"params": list(late.parameters())})
    zero_unused(optimizer, trained=trained)
    assert late.weight.grad is None


def test_a_compressor_of_the_scripts_own_is_refused() -> None:
    class InBF16:
        @staticmethod
        def compress(tensor: torch.Tensor) -> Any:
            return tensor.bfloat16(), tensor.dtype

    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"Use hvd.Compression.fp16 or none"):
        hvd.DistributedOptimizer(optimizer, compression=InBF16)


def mixed(first: str, second: str) -> list[float]:
    """One loss through two models; how its step changes what the first rank's alone would."""
    hvd.init()
    torch.manual_seed(0)
    models = [nn.Linear(2, 2), nn.Linear(2, 1)]
    steps = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0),
            model.named_parameters(),
            op=getattr(hvd, op),
        )
        for model, op in zip(models, (first, second), strict=True)
    ]
    loss = models[1](models[0](torch.ones(3, 2))).sum()
    alone = torch.autograd.grad(loss, [one.weight for one in models], retain_graph=True)
    before = [one.weight.detach().clone() for one in models]
    loss.backward()
    for one in steps:
        one.step()
    moved = [was - one.weight.detach() for was, one in zip(before, models, strict=True)]
    return [float((a / b).mean()) for a, b in zip(moved, alone, strict=True)]


def test_a_loss_of_two_models_is_summed_or_averaged_for_each(world_pool: Any) -> None:
    times = {"Average": 1.0, "Sum": 2.0}
    for ops in (("Average", "Average"), ("Sum", "Sum"), ("Average", "Sum")):
        for found in world_pool(2).run(plainly, "ddp", mixed, *ops):
            assert found[0] == pytest.approx([times[op] for op in ops])


def restored() -> list[float]:
    hvd.init()
    model = nn.Linear(2, 1)
    hvd.elastic.TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1)).restore()
    return []


def test_nothing_is_restored_in_silence(world_pool: Any) -> None:
    for said in world_pool(2).run(plainly, "ddp", restored):
        assert "elastic.TorchState.restore() has no counterpart here. Nothing is kept" in said


def compressed(kinds: list[str]) -> list[float]:
    """How far a step takes a weight whose gradient is 2049, of which half precision has 2048."""
    hvd.init()
    found: list[float] = []
    for kind in kinds:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0),
            model.named_parameters(),
            compression=getattr(hvd.Compression, kind),
        )
        model(torch.full((1, 1), 2049.0)).sum().backward()
        optimizer.step()
        found.append(-model.state_dict()["weight"].item())
    return found


@pytest.mark.parametrize("kinds", [["fp16", "none"], ["none", "fp16"]])
@pytest.mark.parametrize("strategy", ["ddp", "horovod", None])
def test_each_optimizer_compresses_by_itself(
    world_pool: Any, strategy: str | None, kinds: list[str]
) -> None:
    if strategy == "horovod":
        pytest.importorskip("horovod")
    expected = [2048.0 if one == "fp16" else 2049.0 for one in kinds]
    assert world_pool(2).run(plainly, strategy, compressed, kinds) == [(expected, [])] * 2


def test_a_strategy_that_does_not_compress_says_so(world_pool: Any) -> None:
    (found, told), (_, quiet) = world_pool(2).run(
        plainly, "ddp:shard_optimizer=true,compression=none", compressed, ["fp16"]
    )
    assert (found, told, quiet) == ([2049.0], [], [])
    (found, told), _ = world_pool(2).run(plainly, "zero2", compressed, ["fp16"])
    assert found == [2049.0]
    assert any("strategy 'zero2' sums gradients as they are" in one for one in told)
