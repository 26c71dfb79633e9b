"""Which optimizers are fused where the user has not said, decided without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from unipar.engine import build_optimizer
from unipar.optimizers import fused
from unipar.optimizers.fused import fused_by_default, is_fused
from unipar.optimizers.groups import factories
from unipar.optimizers.named import NamedOptimizer
from unipar.strategy import EngineSpec


class OnGPU:
    """What is looked at of a parameter on a GPU, which may be divided among ranks."""

    device = torch.device("cuda", 0)

    def __init__(self, *, whole: bool = True, floating: bool = True) -> None:
        self.whole, self.floating = whole, floating

    def is_floating_point(self) -> bool:
        return self.floating


WHOLE, SHARD = OnGPU(), OnGPU(whole=False)


@pytest.mark.parametrize(
    ("name", "options", "parameters", "expected"),
    [
        ("adam", {}, [WHOLE, WHOLE], True),
        ("adamw", {"lr": 0.1, "fused": None, "amsgrad": True}, [WHOLE], True),
        ("sgd", {"weight_decay": 0.1}, [WHOLE], True),
        ("sgd", {"momentum": 0.9}, [WHOLE], False),
        ("adagrad", {}, [WHOLE], False),
        ("muon", {}, [WHOLE], False),
        ("adamw", {}, [SHARD, SHARD], True),
        ("sgd", {}, [SHARD], False),
        ("adamw", {}, [WHOLE, SHARD], False),
        ("adamw", {"fused": False}, [WHOLE], False),
        ("adamw", {"foreach": True}, [WHOLE], False),
        ("adamw", {"differentiable": True}, [WHOLE], False),
        ("adamw", {}, [WHOLE, OnGPU(floating=False)], False),
        ("adamw", {}, [WHOLE, torch.zeros(1)], False),
    ],
)
def test_it_is_a_default_where_it_is_possible(
    name: str,
    options: dict[str, Any],
    parameters: list[Any],
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused, "is_dtensor", lambda p: not getattr(p, "whole", True))
    assert not is_fused(name, options, parameters)
    with fused_by_default(()):
        assert is_fused(name, options, parameters) == expected
    assert not is_fused(name, options, parameters)


def test_sparse_gradients_prevent_it() -> None:
    with fused_by_default([WHOLE]):  # pyright: ignore[reportArgumentType]
        assert not is_fused("sgd", {}, [OnGPU(), WHOLE])  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("optimizer", "may_fuse", "expected"),
    [
        ({"name": "adamw"}, True, [True]),
        ({"name": "AdamW", "fused": False}, True, [False]),
        ({"name": "adamw"}, False, [None]),
        (
            {"a": {"name": "sgd", "params": "0.*"}, "b": {"name": "adagrad"}},
            True,
            [True, None],
        ),
        (lambda named: torch.optim.AdamW([p for _, p in named]), True, [None]),
    ],
    ids=["by name", "chosen", "replaced later", "groups", "a function"],
)
def test_a_strategy_gets_it_where_it_may(
    optimizer: Any, may_fuse: bool, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "DEVICE_TYPES", frozenset({"cpu"}))
    build, _ = factories(optimizer, None)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    built = build_optimizer(EngineSpec(model, build), model, may_fuse=may_fuse)
    assert built is not None
    assert [group["fused"] for group in built.param_groups] == expected


def test_an_embedding_with_sparse_gradients_is_not_stepped_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused, "DEVICE_TYPES", frozenset({"cpu"}))
    model = nn.Embedding(3, 2, sparse=True)
    built = build_optimizer(EngineSpec(model, NamedOptimizer("sgd")), model, may_fuse=True)
    assert built is not None
    model(torch.tensor([1])).sum().backward()
    built.step()


def test_a_parameter_may_have_its_first_gradient_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "DEVICE_TYPES", frozenset({"cpu"}))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    build = NamedOptimizer("sgd", {"momentum": 0.9})
    built = build_optimizer(EngineSpec(model, build), model, may_fuse=True)
    assert built is not None
    for part in (model[0], model):
        part(torch.ones(1, 2)).sum().backward()
        built.step()
    assert all(p in built.state for p in model.parameters())
