"""Weights that ranks divide, as scripts behind faces look at them: whole, or refused by name."""

from __future__ import annotations

import contextlib
import copy
import io
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from faces import by_accelerate, by_deepspeed, by_fabric, under
from torch import nn
from torch.optim.swa_utils import AveragedModel

from unipar.compat import deepspeed
from unipar.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DATA = torch.randn(6, 2, 4, generator=torch.Generator().manual_seed(0))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def squared(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def averaged(face: Callable[..., Any], strategy: str) -> Any:
    """An average of the weights that is made of the prepared model's, and evaluated with."""
    model, step = face(net(), strategy)
    average = [p.detach().clone() for p in model.parameters()]
    for x in DATA:
        step(squared(model, x))
        with torch.no_grad():
            for own, p in zip(average, model.parameters(), strict=True):
                own.mul_(0.5).add_(p.data, alpha=0.5)
    kept = [p.detach().clone() for p in model.parameters()]
    for own, p in zip(average, model.parameters(), strict=True):
        p.data.copy_(own)
    with torch.no_grad():
        found = model(DATA[0])
    for own, p in zip(kept, model.parameters(), strict=True):
        p.data.copy_(own)
    step(squared(model, DATA[0]))
    with torch.no_grad():
        return found.tolist(), model(DATA[0]).tolist()


@pytest.mark.parametrize("face", [by_accelerate, by_fabric, by_deepspeed])
def test_an_average_of_prepared_weights_is_that_of_replicas(world_pool: Any, face: Any) -> None:
    expected = world_pool(2).run(under, "ddp", averaged, face, "ddp")
    found = world_pool(2).run(under, "fsdp", averaged, face, "fsdp")
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def mixed(face: Callable[..., Any]) -> str:
    model, step = face(net(), "fsdp")
    average = net()
    step(squared(model, DATA[0]))
    said = io.StringIO()
    try:
        for own, p in zip(average.parameters(), model.parameters(), strict=True):
            own.data.lerp_(p.data, 0.5)
    except RuntimeError as error:
        with contextlib.redirect_stderr(said):
            # What the interpreter calls where a script ends by an error.
            sys.excepthook(type(error), error, error.__traceback__)
    return said.getvalue()


@pytest.mark.parametrize("face", [by_accelerate, by_fabric, by_deepspeed])
def test_an_average_that_is_not_divided_says_what_to_do(world_pool: Any, face: Any) -> None:
    for said in world_pool(2).run(under, "fsdp", mixed, face):
        assert "own.data.lerp_(p.data, 0.5)" in said
        last = said.splitlines()[-1]
        assert "unipar.errors.ConfigError: a parameter of the model was used outside" in last
        assert "[p.detach().clone() for p in model.parameters()]" in last


def copied(face: Callable[..., Any], strategy: str) -> Any:
    model, step = face(net(), strategy)
    try:
        average = AveragedModel(model, avg_fn=lambda own, new, n: own + (new - own) / 2)
    except ConfigError as error:
        return str(error)
    for x in DATA:
        step(squared(model, x))
        average.update_parameters(model)
    first = copy.deepcopy(model)
    step(squared(model, DATA[0]))
    with torch.no_grad():
        return [one(DATA[1]).tolist() for one in (average, first, model)]


@pytest.mark.parametrize("face", [by_accelerate, by_fabric])
def test_a_copy_of_a_prepared_model_computes_by_itself(world_pool: Any, face: Any) -> None:
    (found, _) = world_pool(2).run(under, "ddp", copied, face, "ddp")
    plain, copies = net(), []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    average = AveragedModel(plain, avg_fn=lambda own, new, n: own + (new - own) / 2)
    for x in (*DATA, DATA[0]):
        copies.append(copy.deepcopy(plain))
        plain(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if len(copies) <= len(DATA):
            average.update_parameters(plain)
    with torch.no_grad():
        expected = [one(DATA[1]).tolist() for one in (average, copies[-1], plain)]
    torch.testing.assert_close(found, expected)
    for said in world_pool(2).run(under, "fsdp", copied, face, "fsdp"):
        assert "a copy (deepcopy, AveragedModel) would hold a part" in said
        assert "average = [p.detach().clone() for p in model.parameters()]" in said


def gathered(enabled: bool) -> Any:
    engine, step = by_deepspeed(net())
    step(squared(engine, DATA[0]))
    found = {}
    for name, p in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters(p, enabled=enabled):
            found[name] = p.data.cpu().tolist(), p.norm().item(), tuple(p.shape)
            p.data.zero_()
    step(squared(engine, DATA[1]))
    with torch.no_grad():
        return found, engine(DATA[0]).tolist()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("zero3", marks=pytest.mark.thorough)])
def test_gathered_parameters_are_whole(world_pool: Any, strategy: str, enabled: bool) -> None:
    plain = net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)

    def step(x: torch.Tensor) -> None:
        plain(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(DATA[0])
    expected = {
        n: (p.tolist(), p.norm().item(), tuple(p.shape)) for n, p in plain.named_parameters()
    }
    step(DATA[1])
    strategy = "zero3:persistence_threshold=0" if strategy == "zero3" else strategy
    for found, output in world_pool(2).run(under, strategy, gathered, enabled):
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(output, plain(DATA[0]).tolist())
