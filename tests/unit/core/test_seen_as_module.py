"""What a loss function is given in the model's place is like the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from unipar.engine import SeenAsModule, SeenReplica, refuse_shared_memory
from unipar.errors import ConfigError


def test_a_container_is_one() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    seen = SeenAsModule(model, model)
    assert seen[0] is model[0]
    assert seen[-1] is model[1]
    assert len(seen) == 2
    assert list(seen) == list(model)
    named = nn.ModuleDict({"a": nn.Tanh()})
    assert "a" in SeenAsModule(named, named)
    assert "b" not in SeenAsModule(named, named)


def test_what_is_none_is_none_and_true() -> None:
    model = nn.Linear(2, 2)
    seen = SeenAsModule(model, model)
    assert seen
    with pytest.raises(TypeError):
        seen[0]


def test_parts_that_go_around_a_replicas_wrapper_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    seen = SeenReplica(model, model)
    assert len(seen) == 2
    with pytest.raises(ConfigError, match=r"uses model\[0\], which goes around DDP's forward"):
        seen[0]
    with pytest.raises(ConfigError, match=r"let the module's forward use self\[0\]"):
        list(seen)


def test_memory_in_common_is_refused_by_strategies_that_divide() -> None:
    with torch.device("meta"):
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        model = nn.Sequential(first, second)
        refuse_shared_memory(model, "fsdp")
        second.weight = nn.Parameter(first.weight.data)
    with pytest.raises(
        ConfigError, match=r"fsdp: '0\.weight' and '1\.weight' of the model"
    ) as said:
        refuse_shared_memory(model, "fsdp")
    assert "strategy='ddp'" in str(said.value)
