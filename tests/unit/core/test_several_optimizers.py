"""Several optimizers in one: which parameters each gets, what is refused, and that all step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from unipar import RunConfig, Session
from unipar.combined import CombinedOptimizer, CombinedScheduler
from unipar.errors import CheckpointError, ConfigError
from unipar.testing.models import Network, points
from unipar.testing.optimizers import matrices
from unipar.testing.scenarios import classify

INNER = ["blocks.*.up.weight", "blocks.*.down.weight"]
SGD, MUON = {"name": "sgd", "lr": 0.02}, {"name": "muon", "lr": 0.02}
ADAMW = {"name": "adamw", "lr": 1e-3}
STEPWISE = {"name": "steplr", "step_size": 2}
COSINE = {"name": "cosineannealinglr", "T_max": 10}


NEEDS_MUON = pytest.mark.skipif(not hasattr(optim, "Muon"), reason="torch 2.9 brings Muon")


def beside_adamw(one: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "matrices": {**one, "params": INNER, "lr_scheduler": STEPWISE},
        "rest": {"name": "adamw", "lr": 3e-3, "lr_scheduler": COSINE},
        **changes,
    }


@pytest.fixture
def session() -> Any:
    with Session("single", device="cpu") as session:
        yield session


def network() -> Network:
    torch.manual_seed(0)
    return Network()


def loss(model: Any, batch: Any) -> torch.Tensor:
    total, count = classify(model, batch)
    return total / count


def by_hand(num_steps: int) -> nn.Module:
    """The plain loop that this is to equal; nothing of unipar in it."""
    model, data = network(), points(16)
    inner = {n: p for n, p in model.named_parameters() if "up.w" in n or "down.w" in n}
    muon = optim.Muon(inner.values(), lr=0.02)
    adamw = optim.AdamW([p for n, p in model.named_parameters() if n not in inner], lr=3e-3)
    stepwise = optim.lr_scheduler.StepLR(muon, 2)
    cosine = optim.lr_scheduler.CosineAnnealingLR(adamw, 10)
    for _ in range(num_steps):
        muon.zero_grad()
        adamw.zero_grad()
        loss(model, data.batch(list(range(16)))).backward()
        muon.step()
        adamw.step()
        stepwise.step()
        cosine.step()
    return model


def train(session: Session, engine: Any, num_steps: int) -> None:
    for _ in range(num_steps):
        for batch in session.loader(points(16), global_batch_size=16, shuffle=False):
            engine.train_step(batch, loss)


@pytest.mark.extra
@NEEDS_MUON
@pytest.mark.parametrize(
    "optimizer",
    [
        beside_adamw(MUON),
        {
            "matrices": {
                "target": lambda named, lr: optim.Muon([p for _, p in named], lr=lr),
                "lr": 0.02,
                "params": matrices,
                "lr_scheduler": lambda optimizer: optim.lr_scheduler.StepLR(optimizer, 2),
            },
            "rest": {"name": "adamw", "lr": 3e-3, "lr_scheduler": COSINE},
        },
    ],
    ids=["named", "functions"],
)
def test_muon_beside_adamw_is_the_loop_written_by_hand(session: Session, optimizer: Any) -> None:
    engine: Any = session.prepare(network(), optimizer=optimizer)
    train(session, engine, 5)
    assert isinstance(engine.lr_scheduler, CombinedScheduler)
    assert [group["optimizer"] for group in engine.optimizer.param_groups] == ["matrices", "rest"]
    for own, expected in zip(engine.module.parameters(), by_hand(5).parameters(), strict=True):
        assert torch.equal(own, expected)


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (
            beside_adamw(SGD, matrices={**SGD, "params": [INNER[0], "block.*"]}),
            r"optimizer.matrices.params has 'block\.\*', which matches none of the 16",
        ),
        (
            beside_adamw(SGD, matrices={**SGD, "params": lambda name, p: p.ndim == 3}),
            r"optimizer.matrices.params takes none of the 16 parameters",
        ),
        (
            beside_adamw(SGD, rest={"name": "adamw", "params": "*.bias"}),
            r"are of none of the groups matrices, rest: inward.weight, .*norm.weight",
        ),
        (
            beside_adamw(SGD, more={"name": "adamw", "params": "blocks.0.*"}),
            r"several groups: blocks.0.up.weight \(matrices and more\), blocks.0.down.weight",
        ),
        (
            {"all": {"name": "adamw", "params": "*"}, "rest": ADAMW},
            r"optimizer.rest is to take what the other groups leave, and they take all 16",
        ),
        (
            {"a": ADAMW, "b": {**ADAMW, "lr": 0.2}},
            r"the groups a, b of optimizer have no params",
        ),
        pytest.param(
            {"a": {**MUON, "params": "blocks.*"}, "b": ADAMW},
            r"optimizer.a: optimizer 'muon' .*2D.*Its parameters are blocks.0.norm.weight \(9,\)",
            marks=[pytest.mark.extra, NEEDS_MUON],
        ),
        (
            {"a": {"params": "*.weight", "target": lambda n: optim.SGD([n[0][1]])}, "b": ADAMW},
            r"optimizer.a: .* its SGD 1 of the 8 parameters .* nothing would train blocks.0.norm",
        ),
        (
            {"a": {"params": "*.weight", "target": lambda n: optim.LBFGS([p for _, p in n])}},
            r"optimizer: 8 parameters to train are of none",
        ),
        (
            {"a": {"target": lambda n: optim.LBFGS([p for _, p in n]), "params": "*"}},
            r"optimizer.a: the optimizer LBFGS .* its step\(\) needs a closure",
        ),
        (beside_adamw(SGD, rest={**ADAMW, "params": 3}), r"optimizer.rest.params is 3"),
        (beside_adamw(SGD, rest={"lr": 0.1}), r"optimizer.rest does not say which optimizer it is"),
        (
            beside_adamw(SGD, rest={"name": "sgd", "target": lambda named: None}),
            r"optimizer.rest: optimizer has both a 'name' \('sgd'\) and a 'target'",
        ),
        (
            {"name": "sgd", "target": lambda named: None},
            r"optimizer has both a 'name' \('sgd'\) and a 'target'",
        ),
        (
            {"target": lambda named: None, "lrr": 0.1},
            r"optimizer's target is a function of \(named\), .* unexpected keyword argument 'lrr'",
        ),
        (beside_adamw(SGD, rest=3), r"optimizer.rest is 3\. Each group is a mapping"),
        (beside_adamw(SGD, rest={"name": "admw"}), r"optimizer.rest: there is no optimizer 'admw'"),
        (
            beside_adamw(SGD, rest={**ADAMW, "lr_scheduler": "reducelronplateau"}),
            r"optimizer.rest.lr_scheduler is a ReduceLROnPlateau",
        ),
        (
            beside_adamw(SGD, rest={**ADAMW, "lr_scheduler": optim.lr_scheduler.ReduceLROnPlateau}),
            r"optimizer.rest.lr_scheduler is a ReduceLROnPlateau",
        ),
        (
            beside_adamw(SGD, rest={"target": optim.SGD([torch.zeros(1)])}),
            r"optimizer.rest: .* built already",
        ),
    ],
)
def test_groups_that_train_no_model_whole_are_refused(
    session: Session, optimizer: Any, says: str
) -> None:
    with pytest.raises(ConfigError, match=rf"(?s){says}"):
        session.prepare(network(), optimizer=optimizer)


def test_one_scheduler_is_of_all_groups_or_each_has_its_own(session: Session) -> None:
    with pytest.raises(ConfigError, match=r"and so was optimizer.matrices.lr_scheduler"):
        session.prepare(network(), optimizer=beside_adamw(SGD), lr_scheduler=STEPWISE)
    groups = {"matrices": {**SGD, "params": INNER}, "rest": ADAMW}
    plateau = {"name": "reducelronplateau", "patience": 0, "factor": 0.5}
    engine: Any = session.prepare(network(), optimizer=groups, lr_scheduler=plateau)
    for metric in (1.0, 2.0):
        engine.lr_scheduler.step(metric)
    assert [group["lr"] for group in engine.optimizer.param_groups] == [0.01, 5e-4]
    with_metric = {**plateau, "metric": "loss"}
    with pytest.raises(ConfigError, match=r"lr_scheduler has a metric, by which fit"):
        session.prepare(network(), optimizer=groups, lr_scheduler=with_metric, name="other")


def combined() -> tuple[nn.Linear, CombinedOptimizer]:
    model = nn.Linear(2, 2)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    parts = {name: optim.SGD([p], lr=1.0) for name, p in model.named_parameters()}
    return model, CombinedOptimizer(parts)


def moved(model: nn.Module, step: Callable[[], Any]) -> list[float]:
    before = [p.detach().clone() for p in model.parameters()]
    step()
    return [
        float((old - new.detach()).mean())
        for old, new in zip(before, model.parameters(), strict=True)
    ]


def test_a_framework_may_update_one_group_at_a_time() -> None:
    """As DeepSpeed's stages 1 and 2 do, which leave the optimizer one group for each step."""
    model, optimizer = combined()
    groups = optimizer.param_groups
    for number, expected in enumerate(([1.0, 0.0], [0.0, 1.0])):
        optimizer.param_groups = [groups[number]]
        assert moved(model, optimizer.step) == pytest.approx(expected)
    optimizer.param_groups = groups
    assert optimizer.optimizers["bias"].param_groups == [groups[1]]
    assert moved(model, optimizer.step) == pytest.approx([1.0, 1.0])


def test_what_is_loaded_or_copied_is_that_of_each() -> None:
    model, optimizer = combined()
    state = optimizer.state_dict()
    state["param_groups"][1]["lr"] = 0.5
    optimizer.load_state_dict(state)
    assert moved(model, optimizer.step) == pytest.approx([1.0, 0.5])
    # Its own loading expects no state of another optimizer's.
    adagrad = optim.Adagrad(optimizer.optimizers["bias"].param_groups)
    optimizer = CombinedOptimizer({**optimizer.optimizers, "bias": adagrad})
    optimizer.state[model.weight] = {"momentum_buffer": torch.zeros(2, 2)}
    copied = copy.deepcopy(optimizer)
    assert copied.optimizers["bias"].param_groups[0] is copied.param_groups[1]
    assert copied.optimizers["bias"].state is copied.state
    state["param_groups"][1]["optimizer"] = "other"
    with pytest.raises(ConfigError, match=r"optimizer='other', and .* are weight, bias"):
        optimizer.load_state_dict(state)


def test_gradients_that_overflow_in_one_group_skip_the_step_of_all() -> None:
    model, optimizer = combined()
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))
    assert model.bias.grad is not None
    model.bias.grad.fill_(torch.inf)
    assert moved(model, lambda: scaler.step(optimizer)) == [0.0, 0.0]
    scaler.update()
    assert scaler.get_scale() == 0.5


def saved(session: Session, directory: Path, optimizer: Any) -> Path:
    engine = session.prepare(network(), optimizer=optimizer, name="model")
    train(session, engine, 3)
    path = session.save(directory)
    del session.engines["model"]
    return path


@pytest.mark.extra
@NEEDS_MUON
def test_each_goes_on_with_its_own_hyperparameters_and_schedule(
    session: Session, tmp_path: Path
) -> None:
    path = saved(session, tmp_path, beside_adamw(MUON))
    engine = session.prepare(Network(), optimizer=beside_adamw(MUON))
    session.load(path)
    train(session, engine, 2)
    for own, expected in zip(engine.module.parameters(), by_hand(5).parameters(), strict=True):
        assert torch.equal(own, expected)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"name": "adamw", "lr": 1e-3}, "matrices: SGD, rest: AdamW, and .* has AdamW"),
        (
            {"inner": beside_adamw(SGD)["matrices"], "rest": beside_adamw(SGD)["rest"]},
            "has inner: SGD, rest: AdamW",
        ),
        (
            beside_adamw(SGD, matrices={**SGD, "params": [*INNER, "outward.weight"]}),
            "lr_scheduler matrices: StepLR, rest: CosineAnnealingLR, and",
        ),
        (
            beside_adamw(
                SGD,
                matrices={**SGD, "params": [*INNER, "outward.weight"], "lr_scheduler": STEPWISE},
            ),
            r"parameter group 0 of the optimizer \(5 parameters\) does not match one stored group",
        ),
    ],
)
def test_other_groups_than_those_that_were_saved_are_refused(
    session: Session, tmp_path: Path, other: Any, says: str
) -> None:
    path = saved(session, tmp_path, beside_adamw(SGD))
    session.prepare(network(), optimizer=other)
    with pytest.raises((CheckpointError, ConfigError), match=rf"(?s){says}"):
        session.load(path)


def test_a_part_of_a_saved_group_is_not_another_optimizers(
    session: Session, tmp_path: Path
) -> None:
    def both(first: str, second: str) -> dict[str, Any]:
        # Of a user's own class, which a checkpoint does not name.
        build = type("Own", (optim.SGD,), {"__module__": __name__})
        target: Any = lambda named: build([p for _, p in named], lr=0.1)  # noqa: E731
        return {first: {"target": target, "params": "*.weight"}, second: {"target": target}}

    path = saved(session, tmp_path, both("a", "b"))
    session.prepare(network(), optimizer=both("b", "a"))
    with pytest.raises((CheckpointError, ConfigError), match=r"(?s)b, a|of the optimizer 'a'"):
        session.load(path)


def test_a_config_lays_groups_over_one_optimizer_and_values_over_groups() -> None:
    one = {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}}
    groups = beside_adamw(SGD)
    config = RunConfig.build(one, optimizer=groups)
    assert config.optimizer.factory().groups[0].build.options == {"lr": 0.02}  # pyright: ignore
    changed = RunConfig.build(config, optimizer={"rest": {"lr": 0.5}})
    rest = changed.optimizer.factory().groups[1]  # pyright: ignore
    assert rest.build.options == {"lr": 0.5}
    assert rest.lr_scheduler.name == "cosineannealinglr"
    back = RunConfig.build(changed, optimizer={"name": "adamw"})
    assert back.optimizer.model_dump() == {"name": "adamw"}
    with pytest.raises(ConfigError, match=r"optimizer.lr: 0.1 was given. Allowed: a mapping"):
        RunConfig.build({"optimizer": {"lr": 0.1, "matrices": SGD}})
    with pytest.raises(ConfigError, match=r"optimizer.rest.name"):
        RunConfig.build({"optimizer": {"matrices": {**SGD, "params": "*"}, "rest": {"lr": 1}}})
    unknown = {"name": "adamw", "lrr": 1}
    with pytest.raises(ConfigError, match=r"optimizer.rest: optimizer 'adamw' has no argument"):
        RunConfig.build({"optimizer": {"matrices": {**SGD, "params": "*"}, "rest": unknown}})
