"""Hyperparameters, schedulers and scalers take over nothing that they cannot go on from."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unipar.combined import CombinedOptimizer, CombinedScheduler
from unipar.engine.state import import_scaler, import_scheduler, restore_groups
from unipar.errors import CheckpointError
from unipar.state import GroupState


def source(**extra: Any) -> Any:
    return SimpleNamespace(extra=extra)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=0.1)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("lr", math.nan, "lr of group 0 is nan"),
        ("lr", None, "lr of group 0 is None"),
        ("lr", {}, "lr of group 0 is {}"),
        ("betas", [0.9], r"betas of group 0 is \(0.9,\)"),
        ("amsgrad", 3, "amsgrad of group 0 is 3"),
    ],
)
def test_a_hyperparameter_that_is_none_is_named(key: str, value: Any, named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        restore_groups((GroupState(("w",), {key: value}),), [("w",)], optimizer())


def test_infinity_and_further_keys_are_hyperparameters() -> None:
    own = optimizer()
    stored = {"lr": math.inf, "betas": [0.8, 0.9], "initial_lr": 0.5, "foreach": True}
    restore_groups((GroupState(("w",), stored),), [("w",)], own)
    (group,) = own.param_groups
    assert (group["lr"], group["betas"], group["initial_lr"]) == (math.inf, (0.8, 0.9), 0.5)


@pytest.mark.parametrize("stored", [{"step_size": "x"}, {"base_lrs": 3}, {"last_epoch": [1]}, 3])
def test_the_state_of_another_scheduler_is_refused(stored: Any) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer(), 3)
    with pytest.raises(CheckpointError, match="lr_scheduler"):
        import_scheduler(scheduler, source(lr_scheduler=stored))


def test_schedulers_of_other_optimizers_are_refused() -> None:
    def each(*names: str) -> CombinedScheduler:
        several = CombinedOptimizer({name: optimizer() for name in names})
        built = {n: torch.optim.lr_scheduler.StepLR(o, 3) for n, o in several.optimizers.items()}
        return CombinedScheduler(several, built)

    stored = each("a", "b")
    stored.optimizer.step()
    stored.step()
    restored = each("a", "b")
    import_scheduler(restored, source(lr_scheduler=stored.state_dict()))
    assert (restored.last_epoch, restored.schedulers["b"].last_epoch) == (1, 1)
    with pytest.raises(CheckpointError, match=r"has schedulers of a, b, and this run of a, c"):
        import_scheduler(each("a", "c"), source(lr_scheduler=stored.state_dict()))


def test_a_schedulers_own_refusal_is_named() -> None:
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer(), lambda step: 1.0)
    with pytest.raises(CheckpointError, match=r"stored lr_scheduler is none of LambdaLR: KeyError"):
        import_scheduler(scheduler, source(lr_scheduler={"last_epoch": 3}))


@pytest.mark.parametrize(
    "change",
    [
        {"scale": 0.0},
        {"scale": -1.0},
        {"scale": math.nan},
        {"scale": "x"},
        {"growth_interval": 0},
        {"_growth_tracker": -1},
        {"_growth_tracker": None},
    ],
)
def test_no_state_of_a_scaler_is_refused(change: dict[str, Any]) -> None:
    scaler = torch.amp.GradScaler("cpu")
    state = {**scaler.state_dict(), "_growth_tracker": 5}
    import_scaler(scaler, source(scaler=state))
    assert scaler.state_dict()["_growth_tracker"] == 5
    import_scaler(scaler, source(scaler={**state, "_growth_tracker": 0}))
    (key,) = change
    with pytest.raises(CheckpointError, match=rf"scaler\.{key} is"):
        import_scaler(scaler, source(scaler={**state, **change}))
    with pytest.raises(CheckpointError, match=rf"scaler\.{key} is missing"):
        import_scaler(scaler, source(scaler={k: v for k, v in state.items() if k != key}))
