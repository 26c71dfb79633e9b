"""What a user of Accelerate's DeepSpeed plugin meets: ZeRO without the plugin's traps."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unipar import Session, fit
from unipar.errors import ConfigError
from unipar.strategy import Availability
from unipar.testing.cases.views import shows_losses_the_users_module
from unipar.testing.checkpoints import checkpoint_tests
from unipar.testing.kit import Kit, Target
from unipar.testing.pool import WorldPools
from unipar.testing.portability import Where
from unipar.world import Placement
from unipar_accelerate import zero
from unipar_deepspeed.strategy import DeepSpeedStrategy

ZERO = "accelerate:plugin=deepspeed"
DATA = (torch.randn(64, 4), torch.randn(64, 1))


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=1e-2)


def halving(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def train(session: Session) -> Any:
    """Clipping, accumulation and a scheduler, which the plugin gets wrong."""
    engine: Any = session.prepare(
        build(), optimizer=adamw, lr_scheduler=halving, max_grad_norm=0.05
    )
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(48, 4, generator=generator)
    data = (x, x.sum(dim=1, keepdim=True))
    loader = session.loader(data, global_batch_size=8, micro_batch_size=1)
    steps = [engine.train_step(batch, loss_fn) for batch in loader]
    rates = engine.lr_scheduler.get_last_lr()
    return engine, [(s.loss, s.grad_norm) for s in steps], rates


def numbers_under(placement: Placement, strategy: str) -> Any:
    with Session(strategy, device="cpu", placement=placement) as session:
        return train(session)[1:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "ranks"),
    [(0, 2), (1, 2), pytest.param(2, 4, marks=pytest.mark.thorough), (3, 1)],
)
def test_clipping_accumulation_and_scheduler_are_the_runs(
    world_pool: WorldPools, stage: int, ranks: int
) -> None:
    ((expected, lrs),) = world_pool(1).run(numbers_under, "single")
    for found, own in world_pool(ranks).run(numbers_under, f"{ZERO},stage={stage}"):
        assert torch.tensor(found) == pytest.approx(torch.tensor(expected), rel=1e-5)
        assert own == lrs


@pytest.mark.slow
def test_losses_compute_from_weights_by_their_names(world_pool: WorldPools) -> None:
    """Under stage 3, which runs the whole kit, that is an error."""
    shows_losses_the_users_module.check(Kit(Target.named(f"{ZERO},stage=2"), 2, world_pool))


def use_accelerator(placement: Placement) -> list[dict[str, Any]]:
    """Two sessions of one process, the second of them one of Accelerate's DDP."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    found: list[dict[str, Any]] = []
    for strategy in (f"{ZERO},stage=3", "accelerate"):
        place = replace(placement, init_method=f"{placement.init_method}-{len(found)}")
        with Session(strategy, device="cpu", placement=place) as session:
            engine, numbers, _ = train(session)
            accelerator = engine.accelerator
            own = Accelerator()
            rank = torch.tensor([float(accelerator.process_index)])
            found.append(
                {
                    "numbers": numbers,
                    "kind": accelerator.distributed_type.value,
                    "wrapped": type(engine.loop_model).__name__,
                    "is plain": type(accelerator.unwrap_model(engine.model)) is nn.Sequential,
                    "ranks": accelerator.gather(rank).tolist(),
                    "own": own.distributed_type.value,
                    "zero.Init": is_deepspeed_zero3_enabled(),
                }
            )
        assert not AcceleratorState._shared_state
        assert not PartialState._shared_state
        assert not [name for name in os.environ if name.startswith("ACCELERATE_")]
    return found


def test_the_accelerator_is_there_and_is_deepspeeds(world_pool: WorldPools) -> None:
    ((expected, _),) = world_pool(1).run(numbers_under, "single")
    for first, second in world_pool(2).run(use_accelerator):
        for own in (first, second):
            assert torch.tensor(own["numbers"]) == pytest.approx(torch.tensor(expected), rel=1e-5)
            assert own["is plain"]
            assert own["ranks"] == [0.0, 1.0]
            assert not own["zero.Init"]
        assert (first["kind"], first["own"]) == ("DEEPSPEED", "DEEPSPEED")
        assert first["wrapped"] == "DeepSpeedEngine"
        assert (second["kind"], second["own"]) == ("MULTI_CPU", "MULTI_CPU")


def call(placement: Placement, method: str) -> None:
    with Session(f"{ZERO},stage=1", device="cpu", placement=placement) as session:
        engine, _, _ = train(session)
        getattr(engine.accelerator, method)(torch.tensor(0.0))


@pytest.mark.parametrize(
    ("method", "instead"),
    [
        ("backward", r"engine\.backward\(loss, num_items"),
        ("clip_grad_norm_", "max_grad_norm"),
        ("clip_grad_value_", "max_grad_norm"),
        ("accumulate", "micro_batch_size"),
        ("no_sync", "micro_batch_size"),
    ],
)
def test_methods_that_do_something_else_are_refused(
    world_pool: WorldPools, method: str, instead: str
) -> None:
    with pytest.raises(ConfigError, match=rf"accelerator\.{method}\(\) does not do.*{instead}"):
        world_pool(1).run(call, method)


def with_accelerator_made_before(placement: Placement) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    try:
        with Session(f"{ZERO},stage=1", device="cpu", placement=placement) as session:
            Accelerator(cpu=True)
            train(session)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def test_an_accelerator_made_before_is_refused(world_pool: WorldPools) -> None:
    """Accelerate would leave DeepSpeed out, or raise an error of its own."""
    with pytest.raises(ConfigError, match=r"made before the run.*engine\.accelerator"):
        world_pool(2).run(with_accelerator_made_before)


PLACES = [Where("ddp", 2), Where(f"{ZERO},stage=2", 2), Where(f"{ZERO},stage=3", 4)]

(
    test_resumes_what_its_neighbor_has_saved,
    test_resumes_what_any_other_has_saved,
) = checkpoint_tests(PLACES)


# -- what is refused before any process starts -----------------------------------------------------


def start(directory: Path, strategy: str, **changed: Any) -> None:
    quiet: dict[str, Any] = {"progress": False, "output_dir": directory, "loss": loss_fn}
    settings = {"device": "cpu", "devices": 2, "global_batch_size": 16, "steps": 4, **changed}
    fit(build(), DATA, strategy=strategy, **quiet, **settings)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("accelerate:stage=1", r"stage means nothing with plugin='ddp'.*plugin='deepspeed'"),
        (f"{ZERO},wrap=none", r"wrap means nothing with plugin='deepspeed'.*plugin='fsdp'"),
        (f"{ZERO},stage=4", r"stage.*0, 1, 2 or 3"),
        (f'{ZERO},deepspeed={{"stage":1}}', r"set the stage beside it"),
        (f'{ZERO},deepspeed={{"offload_optimiser":true}}', r"Did you mean 'offload_optimizer'"),
        (f'{ZERO},deepspeed={{"native":{{"bf16":{{}}}}}}', r"native sets DeepSpeed's 'bf16'"),
        (f'{ZERO},native={{"gradient_clipping":1.0}}', r"not taken with plugin='deepspeed'"),
        (f'{ZERO},native={{"mixed_precision":"bf16"}}', r"the run's precision"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, strategy: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start(tmp_path, strategy)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3", r"the run has 2.*option 'stage'"),
        ("ACCELERATE_GRADIENT_CLIPPING", "0.5", r"the run has 1.*max_grad_norm"),
        ("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "cpu", r"option 'deepspeed'"),
        ("ACCELERATE_DEEPSPEED_CONFIG_FILE", "ds.json", r"option 'deepspeed'"),
        ("ACCELERATE_USE_FSDP", "true", r"plugin='fsdp'"),
    ],
)
def test_what_the_launcher_has_set_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"{name}={value}.*{message}"):
        start(tmp_path, ZERO, max_grad_norm=1.0)


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Availability(False, "DeepSpeed is not installed.", "unipar install deepspeed")
    monkeypatch.setattr(DeepSpeedStrategy, "availability", classmethod(lambda cls: absent))
    with pytest.raises(ConfigError, match=r"not installed\..*unipar install deepspeed"):
        start(tmp_path, ZERO)
    monkeypatch.undo()
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "transformers" else found(name)
    )
    with pytest.raises(ConfigError, match=r"pip install transformers"):
        start(tmp_path, ZERO)
    monkeypatch.undo()
    monkeypatch.setattr(zero.registry, "names", lambda: ["accelerate"])
    with pytest.raises(ConfigError, match=r"pip install \./backends/deepspeed"):
        start(tmp_path, ZERO)
