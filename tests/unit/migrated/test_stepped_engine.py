"""Engines that count micro-batches, and what ranks exchange, without a script around them."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from unipar.errors import CheckpointError, ConfigError
from unipar.migrated import script, stepped

pytestmark = pytest.mark.usefixtures("run")


def sgd(named):
    return torch.optim.SGD([p for _, p in named], lr=0.5)


def start(**options):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return model, stepped.initialize(model, optimizer=sgd, **options)


def test_weights_are_updated_after_so_many_micro_batches() -> None:
    model, (engine, optimizer, _, scheduler) = start(
        accumulation_steps=3,
        lr_scheduler=lambda one: torch.optim.lr_scheduler.ExponentialLR(one, 0.5),
    )
    plain = nn.Linear(3, 1)
    plain.load_state_dict(model.state_dict())
    parts = torch.randn(3, 4, 3)
    (sum(plain(part).square().mean() for part in parts) / 3).backward()  # pyright: ignore
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    boundaries = []
    for part in parts:
        boundaries.append(engine.is_gradient_accumulation_boundary())
        before = model.weight.clone()
        loss = engine(part).square().mean()
        assert engine.backward(loss).item() == pytest.approx(loss.item() / 3)
        engine.step()
        assert torch.equal(model.weight, before) is not boundaries[-1]
    assert boundaries == [False, False, True]
    assert (engine.micro_steps, engine.global_steps) == (3, 1)
    assert torch.allclose(model.weight, plain.weight, rtol=1e-6)
    assert engine.get_lr() == scheduler.get_last_lr() == [0.25]
    assert engine.optimizer is optimizer


def test_a_script_may_say_itself_where_a_step_ends() -> None:
    model, (engine, *_) = start(accumulation_steps=9)
    engine.set_gradient_accumulation_boundary(True)
    before = model.weight.clone()
    engine.backward(engine(torch.ones(1, 3)).sum())
    engine.step()
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize(
    ("given", "micro", "accumulation"),
    [
        ({"train_batch_size": 12}, 12, 1),
        ({"train_batch_size": 12, "micro_batch_size": 4}, 4, 3),
        ({"train_batch_size": 12, "accumulation_steps": 2}, 6, 2),
        ({"micro_batch_size": 4, "accumulation_steps": 2}, 4, 2),
    ],
)
def test_batch_sizes_follow_from_each_other(
    given: dict[str, int], micro: int, accumulation: int
) -> None:
    _, (engine, *_) = start(**given)
    assert engine.train_micro_batch_size_per_gpu() == micro
    assert engine.gradient_accumulation_steps() == accumulation
    assert engine.train_batch_size() == micro * accumulation


def test_batch_sizes_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"train_batch_size=10 is not micro_batch_size=4 times accumulation_steps=2 times 1",
    ):
        start(train_batch_size=10, micro_batch_size=4)


def test_training_data_become_a_loader() -> None:
    data = TensorDataset(torch.arange(10.0)[:, None])
    _, (_, _, loader, _) = start(micro_batch_size=4, training_data=data, drop_last=True)
    assert loader is not None
    assert [len(batch[0]) for batch in loader] == [4, 4]


def test_checkpoints_bring_back_weights_counts_and_state(tmp_path: Path) -> None:
    model, (engine, *_) = start(accumulation_steps=2)
    assert engine.load_checkpoint(tmp_path / "none") == (None, {})
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 3)).sum())
        engine.step()
    engine.save_checkpoint(tmp_path / "all", client_state={"epoch": 4})
    weight = model.weight.clone()
    assert (tmp_path / "all" / "latest").read_text() == "global_step1"
    engine.backward(engine(torch.ones(2, 3)).sum())
    engine.step()
    assert not torch.equal(model.weight, weight)
    path, state = engine.load_checkpoint(tmp_path / "all")
    assert path == str(tmp_path / "all" / "global_step1")
    assert state == {"epoch": 4}
    assert torch.equal(model.weight, weight)
    assert (engine.micro_steps, engine.global_steps) == (3, 1)


def test_deepspeeds_own_checkpoints_are_named(tmp_path: Path) -> None:
    _, (engine, *_) = start()
    (tmp_path / "latest").write_text("global_step9")
    (tmp_path / "global_step9").mkdir()
    (tmp_path / "global_step9" / "mp_rank_00_model_states.pt").touch()
    with pytest.raises(CheckpointError, match="Convert it: unipar convert --from deepspeed"):
        engine.load_checkpoint(tmp_path)


def test_the_command_line_may_go_on_naming_the_settings(capsys) -> None:
    parser = stepped.add_config_arguments(argparse.ArgumentParser(), "ds.json")
    assert parser.parse_args(["--deepspeed", "--deepspeed_config", "conf/ds.json"]).deepspeed
    with pytest.raises(SystemExit):
        parser.parse_args(["--deepspeed_config", "other.json"])
    assert "unipar.yaml was made of ds.json, not of other.json" in capsys.readouterr().err


def test_where_a_process_stands_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    script.open()
    monkeypatch.setenv("RANK", "7")  # As DeepSpeed sets it while it starts.
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


@pytest.mark.parametrize(
    ("precision", "asked"), [("fp32", (False, False)), ("bf16", (False, True))]
)
def test_the_precision_is_that_of_the_run(run: Path, precision: str, asked: tuple) -> None:
    run.write_text(f"strategy: single\ndevice: cpu\nprecision: {precision}\n")
    _, (engine, _, _, _) = start()
    assert (engine.fp16_enabled(), engine.bfloat16_enabled()) == asked
