"""What migrated scripts call, without a script around it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from unipar.errors import CheckpointError, ConfigError
from unipar.migrated import script
from unipar.migrated.script.engines import renewed

pytestmark = pytest.mark.usefixtures("run")


def sgd(named):
    return torch.optim.SGD([p for _, p in named], lr=0.5)


def test_several_losses_of_a_step_add_up_as_in_torch() -> None:
    torch.manual_seed(0)
    model, plain = nn.Linear(3, 1), nn.Linear(3, 1)
    plain.load_state_dict(model.state_dict())
    parts = torch.randn(3, 4, 3)
    optimizer = script.prepare(model, optimizer=sgd).optimizer
    other = torch.optim.SGD(plain.parameters(), lr=0.5)
    for _ in range(2):
        for part in parts:
            script.backward(script.engine(model)(part).square().mean() / 2, optimizer)
            (plain(part).square().mean() / 2).backward()
        script.engine(optimizer).step()
        other.step()
        other.zero_grad()
        assert torch.allclose(model.weight, plain.weight, rtol=1e-6)


def test_the_scripts_random_numbers_stay_its_own() -> None:
    model = nn.Linear(1, 1)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    script.prepare(model, optimizer=sgd)
    assert torch.equal(torch.rand(1), expected)


def test_a_model_without_an_engine_is_named() -> None:
    with pytest.raises(ConfigError, match=r"this Linear has no engine: call script\.prepare"):
        script.engine(nn.Linear(1, 1))


def test_a_model_that_is_not_trained_computes_by_itself() -> None:
    script.prepare(nn.Linear(1, 1), optimizer=sgd)
    average = nn.Linear(1, 1)
    with torch.no_grad():
        assert script.engine(average) is average
    assert script.engine(average.eval()) is average
    assert script.engine(average.train().requires_grad_(False)) is average


@pytest.mark.parametrize("begun", [False, True])
def test_an_optimizer_over_parameters_of_before_updates_the_final_ones(begun: bool) -> None:
    model = nn.Linear(2, 1)
    kind = torch.optim.Adagrad if begun else torch.optim.Adam  # Adagrad has state from the start.
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias]}]
    build = renewed(lambda _: kind(groups, lr=0.2), model)
    model.weight = nn.Parameter(model.weight.detach().clone())  # As a strategy does it.
    if begun:
        with pytest.raises(ConfigError, match="would never be updated"):
            build(model.named_parameters())
        return
    held = [
        (group["lr"], group["params"]) for group in build(model.named_parameters()).param_groups
    ]
    assert [rate for rate, _ in held] == [0.1, 0.2]
    assert held[0][1][0] is model.weight
    assert held[1][1][0] is model.bias


def test_parameters_that_are_not_the_models_are_refused() -> None:
    other = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="would never be updated"):
        script.prepare(
            nn.Linear(2, 2), optimizer=lambda _: torch.optim.SGD(other.parameters(), lr=1)
        )


def test_wrong_settings_are_told_with_their_place(run: Path) -> None:
    run.write_text("strategy: single\nprecison: bf16\n")
    with pytest.raises(ConfigError, match=r"unipar\.yaml, line 2: unknown key .precison"):
        script.settings()


def test_a_variable_overrides_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIPAR_PRECISION", "bf16")
    assert script.settings().precision == "bf16"
    assert script.autocast().fast_dtype is torch.bfloat16


def test_a_loader_stays_as_it_is_on_one_rank() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(5)), batch_size=2)
    assert script.split(loader) is loader


def test_gathered_states_are_by_name_whatever_the_strategy() -> None:
    model = nn.Linear(3, 1)
    optimizer = script.prepare(model, optimizer=sgd).optimizer
    weights = script.gathered(model).state_dict()
    assert list(weights) == ["weight", "bias"]
    groups = script.gathered(optimizer).state_dict()["param_groups"]
    assert groups[0]["params"] == ["weight", "bias"]
    script.gathered(model).load_state_dict({"weight": torch.ones(1, 3), "bias": torch.ones(1)})
    assert model.weight.tolist() == [[1.0, 1.0, 1.0]]


def test_a_state_that_does_not_fit_is_told_by_name() -> None:
    model = nn.Linear(3, 1)
    optimizer = script.prepare(model, optimizer=sgd).optimizer
    with pytest.raises(
        CheckpointError, match=r"in the state dict do not fit(.|\n)*wanted \[1, 3\]"
    ):
        script.gathered(model).load_state_dict({"weight": torch.ones(2), "bias": torch.ones(1)})
    numbered = {"state": {}, "param_groups": [{"lr": 0.5, "params": [0, 1]}]}
    with pytest.raises(ConfigError, match="by the numbers of parameters"):
        script.gathered(optimizer).load_state_dict(numbered)


def test_an_optimizer_that_has_not_stepped_has_moments_to_load_into() -> None:
    model = nn.Linear(3, 1)
    optimizer = script.prepare(
        model, optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.1)
    ).optimizer
    assert optimizer is not None
    before = model.weight.detach().clone()
    state = script.gathered(optimizer).state_dict()["state"]["weight"]
    assert {key: value.abs().sum().item() for key, value in state.items()} == {
        "step": 0, "exp_avg": 0, "exp_avg_sq": 0
    }  # fmt: skip
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert torch.equal(model.weight, before)


def test_where_a_process_stands_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    script.open()
    monkeypatch.setenv("RANK", "7")  # As frameworks set it while they start.
    assert script.placement().rank == 0


def test_a_new_optimizers_broadcast_is_a_step_on_zeros() -> None:
    model = nn.Linear(3, 1, bias=False)
    optimizer = script.prepare(
        model,
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], 0.1, weight_decay=0.5),
    ).optimizer
    assert optimizer is not None
    weight = model.weight.detach().clone()
    script.broadcast_optimizer(optimizer, counted=False)
    assert torch.allclose(model.weight, weight * 0.95)
    assert not optimizer.state
    script.broadcast_optimizer(optimizer)
    assert [state["step"].item() for state in optimizer.state.values()] == [1.0]
    script.broadcast_optimizer(optimizer)
    assert [state["step"].item() for state in optimizer.state.values()] == [1.0]
