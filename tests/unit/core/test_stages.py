"""Several modules in one engine have the names, the steps and the checkpoints of one model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unipar import checkpoint
from unipar.data.batch import Batch, MicroBatch
from unipar.engine import Schedule, StageCall, Stages, StepEngine, build_optimizer
from unipar.engine.schedule import drawing_nothing
from unipar.errors import ConfigError
from unipar.evaluation.evaluate import evaluate
from unipar.objective import Objective
from unipar.strategy import EngineSpec
from unipar.world import Placement, World


class Model(nn.Module):
    """A chain from which layers may be missing."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Linear(4, 4) for i in range(4)})
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = self.scale * torch.tanh(layer(x))
        return x


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def cut(model: Model) -> Stages:
    stages = [copy.deepcopy(model), copy.deepcopy(model)]
    for number, stage in enumerate(stages):
        stage.scale = model.scale
        for name in ("0", "1", "2", "3"):
            if (int(name) < 2) != (number == 0):
                del stage.layers[name]
    return Stages(stages)


class OneAfterTheOther(Schedule):
    """Both stages are here: forward through the two, backward through the two."""

    def __init__(self, stages: Stages) -> None:
        self.stages, self.computed = stages, 0

    def run(self, calls: Sequence[StageCall], *, training: bool) -> None:
        for call in calls:
            (x,), _ = call.inputs()
            with call.computing():
                for stage in self.stages:
                    x = stage(x)
                loss = call.loss(x)
            self.computed += 1
            if training:
                loss.backward()

    def share(self, values: torch.Tensor) -> None:
        pass


def adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for _, p in named], lr=0.05)


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    xs = [torch.randn(n, 4, generator=generator) for n in (3, 2, 3, 2)]
    parts = [MicroBatch(x, len(x)) for x in xs]
    return [Batch(tuple(parts[:2]), 5), Batch(tuple(parts[2:]), 5)]


SQUARE = Objective(lambda x: x, lambda output, x: (output - x).square().mean())


def whole() -> tuple[list[float], Model]:
    model, losses = build(), []
    optimizer = adam(model.named_parameters())
    for batch in batches():
        x = torch.cat([part.data for part in batch])
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def staged() -> StepEngine:
    stages, world = cut(build()), World(Placement())
    spec = EngineSpec(stages, optimizer=adam)
    return StepEngine(
        spec, world, stages, build_optimizer(spec, stages), schedule=OneAfterTheOther(stages)
    )


def test_stages_train_as_the_whole_does_and_are_saved_by_its_names(tmp_path: Path) -> None:
    losses, model = whole()
    engine = staged()
    assert [engine.train_step(b, SQUARE).loss for b in batches()] == pytest.approx(losses, rel=1e-6)
    for name, weight in engine.module.named_parameters():
        torch.testing.assert_close(weight, model.get_parameter(name), rtol=1e-6, atol=1e-6)
    assert [*engine.module.state_dict()] != []
    saved = checkpoint.save(tmp_path, {"model": engine}, engine.world, step=2, strategy="stages")
    into = build()
    checkpoint.load_model(saved, into)
    for name, weight in into.named_parameters():
        torch.testing.assert_close(weight, model.get_parameter(name), rtol=1e-6, atol=1e-6)


def test_an_attribute_of_the_whole_model_is_missing_and_its_layers_are_there_by_name() -> None:
    stages = cut(build())
    assert not hasattr(stages, "layers")
    with pytest.raises(AttributeError, match=r"'layers'.* stages of a pipeline .*named_modules"):
        _ = stages.layers
    assert isinstance(dict(stages.named_modules())["layers.2"], nn.Linear)


def test_a_whole_batch_is_evaluated_in_one_run_of_the_schedule() -> None:
    engine = staged()
    batch = batches()[0]
    x = torch.cat([part.data for part in batch])
    with torch.no_grad():
        expected = (build()(x) - x).square().mean().item()
    found = engine.eval_batch(batch, SQUARE)
    assert float(found.total) / float(found.count) == pytest.approx(expected, rel=1e-6)
    assert float(found.count) == 5


def test_loss_and_metrics_are_made_of_one_run_of_the_schedule() -> None:
    def largest(output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (output - x).abs().mean()

    def measured(inputs: Any) -> tuple[dict[str, float], int]:
        engine = staged()
        predict = Objective(inputs, lambda output, x: (output, x))
        metrics = {"off": largest}
        found = evaluate(engine, batches(), SQUARE, engine.world, metrics=metrics, predict=predict)
        assert engine._pipeline is not None
        schedule = engine._pipeline.schedule
        assert isinstance(schedule, OneAfterTheOther)
        return found, schedule.computed

    once, runs = measured(SQUARE.inputs)
    assert runs == 4
    assert measured(lambda x: x) == (once, 8)


def test_a_loop_of_ones_own_is_refused() -> None:
    with pytest.raises(Exception, match="takes whole steps only"):
        staged()(torch.ones(1, 4))


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"different tensors named 'layers\.0\.bias'"):
        Stages([build(), build()])


@pytest.mark.parametrize("drawn", [False, True])
def test_inputs_that_draw_on_the_device_are_refused(
    drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cuda", 0)
    state = torch.zeros(16, dtype=torch.uint8)

    def inputs() -> str:
        state[0] += drawn
        return "given"

    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda on: state.clone())
    if not drawn:
        assert drawing_nothing(inputs, device) == "given"
        return
    with pytest.raises(ConfigError, match=r"draws random numbers"):
        drawing_nothing(inputs, device)
