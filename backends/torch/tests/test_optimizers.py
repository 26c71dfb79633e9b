"""Optimizers that need whole tensors: the run of a loop written by hand, or a refusal."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from plain import BATCH, batches, build, loss_fn
from torch import nn, optim
from torch.distributed.tensor import DTensor

from unipar.data.batch import Batch, MicroBatch
from unipar.errors import ConfigError
from unipar.strategy import EngineSpec, registry
from unipar.testing.optimizers import adafactor, layerwise
from unipar.world import Placement

Weights = dict[str, torch.Tensor]
Build = Callable[[Any], optim.Optimizer]

TOLERANCE = 1e-5


class Lamb(optim.Optimizer):
    """A user's own: steps of one length, by numbers that are read from tensors."""

    def __init__(self, params: Any, *, shortest: float) -> None:
        self.shortest = shortest
        super().__init__(params, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].mul_(0.9).add_(p.grad)
                # Of a DTensor, this is the norm of a rank's own part.
                length = max(state["momentum"].norm().item(), self.shortest)
                p.sub_(state["momentum"] / length * group["lr"])


# What torch 2.8 would train as another run is refused under fsdp.
MISCOMPUTED = r"fsdp: the optimizer .*\(DTensors of torch 2\.(8|9|10)\."
NEEDS_MUON = pytest.mark.skipif(not hasattr(optim, "Muon"), reason="torch 2.9 brings Muon")

if hasattr(optim, "Muon"):

    class ExactMuon(optim.Muon):
        """Muon whose matrices are not rounded to bf16 before they are multiplied."""

        def step(self, closure: Any = None) -> Any:
            # Versions of torch round in two ways: x.bfloat16(), and x.to(torch.bfloat16).
            with (
                mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone),
                mock.patch.object(torch, "bfloat16", torch.float32),
            ):
                return super().step(closure)


def lamb(named: Any) -> optim.Optimizer:
    return Lamb([p for _, p in named], shortest=1e-6)


def muon(named: Any) -> optim.Optimizer:
    return optim.Muon([p for _, p in named if p.ndim == 2], lr=0.02)


def exact_muon(named: Any) -> optim.Optimizer:
    return ExactMuon([p for _, p in named if p.ndim == 2], lr=0.02)


def plainly(build_optimizer: Build) -> Weights:
    """The hand-written loop; nothing of unipar in it."""
    model = build()
    optimizer = build_optimizer(model.named_parameters())
    for inputs, targets in batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train(placement: Placement, strategy: str, build_optimizer: Build) -> Weights | str:
    """The weights after the same steps under a strategy; or what was refused."""
    prepared = registry.resolve(strategy)
    world = prepared.setup(placement)
    try:
        engine = prepared.prepare(EngineSpec(build(), build_optimizer), world)
        share = BATCH // placement.size
        own = slice(placement.rank * share, (placement.rank + 1) * share)
        for inputs, targets in batches():
            part = MicroBatch((inputs[own], targets[own]), share)
            engine.train_step(Batch((part,), BATCH), loss_fn)
        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in engine.module.named_parameters()
        }
    except ConfigError as error:
        return str(error)
    finally:
        prepared.teardown()
        world.leave()


def apart(one: Weights, other: Weights) -> float:
    """The largest difference, relative to the largest element of its tensor."""
    return max(float((one[n] - other[n]).abs().max() / other[n].abs().max()) for n in other)


@pytest.mark.parametrize(
    ("strategy", "build_optimizer"),
    [
        ("ddp", adafactor),
        ("ddp", lamb),
        ("ddp:shard_optimizer=true", adafactor),
        ("fsdp", layerwise),
        pytest.param("fsdp", exact_muon, marks=[pytest.mark.extra, NEEDS_MUON]),
    ],
)
def test_what_is_taken_is_trained_as_by_hand(
    strategy: str, build_optimizer: Build, world_pool: Any
) -> None:
    weights = world_pool(2).run(train, strategy, build_optimizer)[0]
    if isinstance(weights, str) and re.search(MISCOMPUTED, weights):
        return
    assert not isinstance(weights, str), weights
    assert apart(weights, plainly(build_optimizer)) < TOLERANCE


@pytest.mark.extra
@NEEDS_MUON
def test_muon_under_fsdp_is_as_far_from_the_plain_loop_as_its_own_bf16_takes_it(
    world_pool: Any,
) -> None:
    weights = world_pool(2).run(train, "fsdp", muon)[0]
    assert not isinstance(weights, str), weights
    rounding = apart(plainly(muon), plainly(exact_muon))
    assert rounding > TOLERANCE
    assert apart(weights, plainly(muon)) < 2 * rounding


@pytest.mark.parametrize(
    ("strategy", "build_optimizer", "message"),
    [
        (
            "fsdp",
            adafactor,
            "fsdp: the optimizer Adafactor cannot be used .* tensors a number was read",
        ),
        (
            "fsdp",
            lamb,
            r"fsdp: the optimizer Lamb cannot be used .* tensors a number was read .*whole \(.*ddp",
        ),
        # It is built once more for each rank's share, and nobody knows what with.
        ("ddp:shard_optimizer=true", lamb, "ddp: the optimizer Lamb .* it raised TypeError"),
    ],
)
def test_what_would_go_wrong_is_refused_on_every_rank(
    strategy: str, build_optimizer: Build, message: str, world_pool: Any
) -> None:
    for said in world_pool(2).run(train, strategy, build_optimizer):
        assert isinstance(said, str)
        assert re.search(f"{message}|{MISCOMPUTED}", said), said
