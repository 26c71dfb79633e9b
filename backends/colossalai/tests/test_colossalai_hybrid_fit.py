"""``unipar.fit`` with tensor and pipeline parallelism, and what it refuses before it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from colossalai_models import language_model
from torch import nn

import unipar
from unipar.cli import main
from unipar.data.batch import MicroBatch
from unipar.engine.checks import check_capabilities
from unipar.errors import ConfigError
from unipar.strategy import EngineSpec, registry
from unipar.testing.pool import WorldPools
from unipar.world import Placement

SCRIPT = Path(__file__).with_name("colossalai_hybrid_run.py")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=150
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", ["pp_size=2", pytest.param("tp_size=2", marks=pytest.mark.thorough)]
)
def test_a_run_trains_the_callers_model_and_is_quiet(sizes: str) -> None:
    done = run(sizes, "warning")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "steps: 6, the stored weights: True, the loss it evaluated: True\n"


@pytest.mark.slow
def test_a_stage_that_is_killed_ends_the_run_with_a_report() -> None:
    done = run("pp_size=2", "warning", "kill")
    assert done.returncode != 0
    assert "Rank 0 of 2 failed" in done.stderr
    assert "SIGKILL" in done.stderr


# -- refused before any process starts -----------------------------------------------------------


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


def refusal(options: str, model: Any, size: int = 2, **asked: Any) -> str:
    strategy = registry.resolve(f"colossalai:plugin=hybrid,{options}")
    with pytest.raises(ConfigError) as caught:
        check_capabilities(strategy, EngineSpec(model, **asked), Placement(size=size))
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "settings", "size", "said"),
    [
        ("tp_size=1", {}, 2, "divides nothing. Set tp_size or pp_size to 2 or more"),
        ("tp_size=2", {}, 3, "3 processes do not fall into such"),
        ("tp_size=2,pp_size=2", {}, 6, "makes 4 processes a replica"),
        ("tp_size=3", {}, 3, "does not divide the model's num_attention_heads=4"),
        ("tp_size=4", {}, 4, "does not divide the model's num_key_value_heads=2"),
        ("tp_size=2", {"intermediate_size": 25}, 2, "intermediate_size=25"),
        ("pp_size=4", {}, 4, "Set pp_size=3 at most"),
        ("tp_size=3", {"kind": "GPT2"}, 3, "does not divide the model's num_attention_heads=4"),
        ("tp_size=2", {"kind": "GPT2", "n_inner": 25}, 2, "n_inner=25"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(
    options: str, settings: dict[str, Any], size: int, said: str
) -> None:
    assert said in refusal(options, language_model(**settings), size)


def test_a_model_without_a_proved_policy_is_refused_with_those_there_are() -> None:
    said = refusal("tp_size=2", Custom())
    assert "this is a Custom" in said
    assert "LlamaForCausalLM" in said
    assert "plugin='zero2'" in said


def test_fit_refuses_it_before_a_process_starts() -> None:
    with pytest.raises(ConfigError, match="It is proved with"):
        unipar.fit(
            Custom(),
            torch.ones(4, 2),
            strategy="colossalai:plugin=hybrid,tp_size=2",
            loss=lambda model, x: model.layer(x).mean(),
            devices=2,
            device="cpu",
            global_batch_size=2,
            steps=1,
            checkpoint=False,
        )


def test_fit_refuses_a_loss_that_a_pipeline_cannot_take_apart() -> None:
    with pytest.raises(ConfigError, match=r"loss=unipar.Objective\(inputs="):
        unipar.fit(
            language_model(),
            [{"input_ids": torch.zeros(4, dtype=torch.long)}] * 4,
            strategy="colossalai:plugin=hybrid,pp_size=2",
            loss=lambda model, batch: model(**batch).logits.mean(),
            devices=2,
            device="cpu",
            global_batch_size=2,
            steps=1,
            checkpoint=False,
        )


def test_so_does_a_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: colossalai_models:language_model\n"
        "data: colossalai_models:Sentences\n"
        "loss: colossalai_models:entropy\n"
        "strategy: colossalai:plugin=hybrid,pp_size=2\n"
        "device: cpu\ndevices: 2\nglobal_batch_size: 8\n"
    )
    assert main(["train", str(file), "--dry-run"]) == 2
    assert "loss=unipar.Objective(inputs=" in " ".join(capsys.readouterr().err.split())


def test_what_is_not_proved_is_refused() -> None:
    said = refusal("tp_size=2", language_model(), compile=True)
    assert "compile is not supported" in said


def test_an_attention_that_is_not_proved_is_refused() -> None:
    said = refusal("tp_size=2", language_model(attn_implementation="flex_attention"))
    assert "takes LlamaForCausalLM with 'eager' or 'sdpa'" in said


def test_attention_to_another_model_is_refused() -> None:
    model = language_model("GPT2", add_cross_attention=True)
    assert "attend to themselves" in refusal("tp_size=2", model)


def test_half_precision_weights_are_refused() -> None:
    assert "Call model.float()" in refusal("tp_size=2", language_model().bfloat16())


@pytest.mark.parametrize(
    ("native", "said"),
    [
        ("enable_sequence_parallelism: true", "does not take here"),
        ("zero_stage: 1", "follows from the option 'zero_stage'"),
        ("tp_size: 2", "the option 'tp_size'"),
        ("num_microbatches: 2", "the run's micro_batch_size"),
        ("max_norm: 1.0", "the run's max_grad_norm"),
    ],
)
def test_native_arguments_that_are_not_proved_are_refused(native: str, said: str) -> None:
    assert said in refusal(f"tp_size=2,native={{{native}}}", language_model())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("adafactor", "cannot be used where ranks divide what it updates"),
        ("frozen", "'model.norm.weight' is frozen"),
        ("auto", "Give numbers"),
    ],
)
def test_what_cannot_be_trained_is_refused(asked: str, said: str, world_pool: WorldPools) -> None:
    with pytest.raises(ConfigError, match=said):
        world_pool(2).run(prepare, asked)


def prepare(placement: Placement, asked: str) -> None:
    kind = torch.optim.Adafactor if asked == "adafactor" else torch.optim.AdamW
    strategy = "colossalai:plugin=hybrid,tp_size=2"
    with unipar.Session(strategy, device="cpu", placement=placement) as session:
        model = language_model()
        model.model.norm.requires_grad_(asked != "frozen")
        engine = session.prepare(model, optimizer=lambda named: kind([p for _, p in named]))
        engine.probe(MicroBatch(None, 1), lambda model, batch: model(**batch).loss)
