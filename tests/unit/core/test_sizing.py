"""``strategy="auto"`` goes by the size of the model, or says that it does not know it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from unipar import Session
from unipar.config import RunConfig
from unipar.errors import ConfigError
from unipar.train import preflight
from unipar.world import Placement

TWO = Placement(size=2, local_size=2)


def small() -> nn.Module:
    return nn.Linear(4, 4)


def large() -> nn.Module:
    """Hundreds of gigabytes, unless it is built without storage."""
    return nn.Sequential(nn.Linear(1 << 18, 1 << 18), nn.Linear(1 << 18, 1 << 18))


def reads_its_weights() -> nn.Module:
    model = small()
    assert float(next(model.parameters()).detach().sum()) < 1e9
    return model


def chosen(model: Any, **settings: Any) -> str:
    config = RunConfig.build({"device": "cpu", "devices": 2, **settings})
    return preflight.plan(config, model).strategy.name


def in_session(**settings: Any) -> str:
    return Session(device="cpu", placement=TWO, **settings).strategy.name


def test_a_model_function_is_counted_without_being_built() -> None:
    before = torch.get_rng_state()
    assert chosen(large) == "fsdp"
    assert chosen(small) == "ddp"
    assert torch.equal(torch.get_rng_state(), before)
    assert chosen(small()) == "ddp"


def test_it_is_not_called_where_its_size_decides_nothing() -> None:
    assert chosen(reads_its_weights, devices=1) == "single"
    assert chosen(reads_its_weights, strategy="ddp") == "ddp"


def test_a_function_that_cannot_be_counted_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot run on the meta device.*strategy='ddp', or bui"):
        chosen(reads_its_weights)
    with pytest.raises(ConfigError, match="the model function returned a dict"):
        chosen(dict)


def test_a_session_goes_by_what_it_is_told() -> None:
    assert in_session(model=large) == "fsdp"
    assert in_session(model=[small(), large]) == "fsdp"
    assert in_session(model=small) == "ddp"
    assert in_session(strategy="ddp") == "ddp"
    assert Session(device="cpu", placement=Placement()).strategy.name == "single"


def test_a_session_that_does_not_know_refuses_to_guess() -> None:
    says = r"goes by the size of the model, which .*Session\(strategy='ddp'\), .*Session\(model=mod"
    with pytest.raises(ConfigError, match=says):
        in_session()


@pytest.mark.parametrize("model", ["gpt2", 3])
def test_what_is_no_model_is_refused(model: Any) -> None:
    says = rf"the model is a {type(model).__name__}. Pass a torch.nn.Module, or a function"
    for choose in (chosen, lambda model: in_session(model=model)):
        with pytest.raises(ConfigError, match=says):
            choose(model)


def test_parameters_without_a_shape_are_refused() -> None:
    def lazy() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyBatchNorm1d())

    for model in (lazy, lazy()):
        with pytest.raises(ConfigError, match=r"take their shape .*: 0.weight, 0.bias, .* sample"):
            chosen(model)
    with Session("single", device="cpu") as session:
        for model in (lazy, lazy()):
            with pytest.raises(ConfigError, match=r"Sequential.*nn.Linear for nn.LazyLin"):
                session.prepare(model)
