"""How the scale of fp16 losses begins and changes is a setting, held against PyTorch's scaler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unipar import Session, fit
from unipar.config import RunConfig
from unipar.errors import ConfigError

ASKED = {"initial": 256, "growth_interval": 2, "growth_factor": 4.0, "backoff_factor": 0.25}
BATCHES = [torch.linspace(-1, 1, 12).reshape(4, 3) * factor for factor in (1, 2, 1e4, 1, 3, 2)]
"""The third is too large for a gradient in fp16."""


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def by_hand(scaler: torch.amp.GradScaler) -> tuple[list[float], torch.Tensor]:
    """A scale before each step and after the last one, and the weights."""
    model, optimizer = parts()
    scales = [scaler.get_scale()]
    for batch in BATCHES:
        with torch.autocast("cpu", torch.float16):
            loss = model(batch).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, next(model.parameters()).detach()


def trained(loss_scale: Any) -> tuple[list[float], torch.Tensor]:
    """The same of an engine."""
    model, _ = parts()
    session = Session("single", device="cpu", precision="fp16", loss_scale=loss_scale)
    with session:
        sgd = {"name": "sgd", "lr": 0.01}
        engine: Any = session.prepare(model, optimizer=sgd, global_batch_size=4)
        scales = [engine.precision.current_scale.item()]
        for batch in BATCHES:
            engine.backward(engine(batch).float().square().mean(), num_items=4)
            engine.step()
            scales.append(engine.precision.current_scale.item())
        return scales, next(model.parameters()).detach().clone()


def test_a_scale_begins_and_changes_as_it_is_asked_to() -> None:
    expected, weights = by_hand(torch.amp.GradScaler("cpu", 256, 4.0, 0.25, 2))
    assert expected == [256, 256, 1024, 256, 256, 1024, 1024]
    scales, own = trained(ASKED)
    assert scales == expected
    assert torch.equal(own, weights)
    assert trained(None)[0] == by_hand(torch.amp.GradScaler("cpu"))[0]


def test_a_scale_of_factors_of_1_never_changes() -> None:
    static = {"initial": 512, "growth_factor": 1, "backoff_factor": 1, "growth_interval": 1}
    scales, weights = trained(static)
    assert scales == [512] * 7
    assert torch.isfinite(weights).all()


def samples() -> list[torch.Tensor]:
    return [torch.ones(3) for _ in range(8)]


def mean(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).float().square().mean()


def scale_of(saved: Path) -> dict[str, Any]:
    with Session("single", device="cpu", precision="fp16") as session:
        engine: Any = session.prepare(parts()[0], optimizer="adamw")
        session.load(saved)
        return engine.precision.scaler.state_dict()


def test_a_run_that_goes_on_goes_on_with_the_stored_scale(tmp_path: Path) -> None:
    def run(steps: int, **asked: Any) -> Path:
        result = fit(
            parts()[0], samples(), loss=mean, global_batch_size=4, steps=steps, precision="fp16",
            strategy="single", device="cpu", output_dir=tmp_path, resume="auto", progress=False,
            loss_scale=asked,
        )  # fmt: skip
        assert result.checkpoint is not None
        return Path(result.checkpoint)

    first = scale_of(run(3, **ASKED))
    assert (first["scale"], first["growth_factor"], first["_growth_tracker"]) == (1024.0, 4.0, 1)
    last = scale_of(run(4, initial=2.0))
    assert (last["scale"], last["growth_factor"], last["_growth_tracker"]) == (4096.0, 4.0, 0)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"precision": "bf16"}, r"loss_scale is given, and precision is 'bf16'.*leave loss_scale"),
        ({"initial": 0}, r"loss_scale\.initial: 0 was given\. Allowed: a number of at least 1\.1"),
        ({"initial": 1e39}, r"loss_scale\.initial: 1e\+39 was given.* of at most 1\.7"),
        ({"initial": True}, r"loss_scale\.initial: a number is needed, and true is none"),
        ({"growth_factor": 0.5}, r"loss_scale\.growth_factor: 0\.5 was given.*of at least 1 "),
        ({"backoff_factor": 2}, r"loss_scale\.backoff_factor: 2 was given.*of at most 1"),
        ({"growth_interval": 0}, r"loss_scale\.growth_interval: 0 was given.*above 0"),
        ({"init": 2}, r"unknown key 'loss_scale\.init'"),
    ],
)
def test_what_is_no_scale_is_refused(asked: dict[str, Any], said: str) -> None:
    precision = asked.pop("precision", "fp16")
    with pytest.raises(ConfigError, match=said):
        RunConfig.build({"precision": precision, "loss_scale": asked})
    with pytest.raises(ConfigError, match=said):
        Session("single", device="cpu", precision=precision, loss_scale=asked)
