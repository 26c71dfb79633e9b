"""What ``accelerate launch`` says counts where a script for Accelerate says nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest

from unipar.compat.accelerate import (
    Accelerator,
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
)
from unipar.compat.accelerate.utils import TorchDynamoPlugin
from unipar.compat.run import current
from unipar.errors import ConfigError
from unipar.strategy import LossScale

pytestmark = pytest.mark.usefixtures("alone")


def launch(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        prefix = "" if name.startswith("FSDP_") else "ACCELERATE_"
        monkeypatch.setenv(f"{prefix}{name}", value)


@pytest.mark.parametrize(
    ("said", "precision"), [(None, "bf16"), ("no", "no"), ("fp16", "fp16")]
)  # fmt: skip
def test_a_precision_counts_where_the_script_leaves_it_open(
    said: str | None, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(monkeypatch, MIXED_PRECISION="bf16")
    assert Accelerator(mixed_precision=said, cpu=True).mixed_precision == precision


def test_a_second_accelerator_is_of_the_first_ones_run(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch, MIXED_PRECISION="fp16", USE_FSDP="true", USE_CPU="true")
    Accelerator(mixed_precision="bf16", cpu=True, strategy="single")
    assert Accelerator().mixed_precision == "bf16"


def test_accumulation_wins_over_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch, GRADIENT_ACCUMULATION_STEPS="8", USE_CPU="True")
    accelerator = Accelerator(gradient_accumulation_steps=2)
    assert accelerator.gradient_accumulation_steps == 8
    assert current.config is not None
    assert current.config.device == "cpu"


def test_plugins_are_those_that_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch, USE_DEEPSPEED="true", MIXED_PRECISION="no", GRADIENT_CLIPPING="0.5",
           GRADIENT_ACCUMULATION_STEPS="4", DEEPSPEED_ZERO_STAGE="3",
           DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE="cpu",
           DEEPSPEED_OFFLOAD_PARAM_DEVICE="none")  # fmt: skip
    strategy = {"name": "zero3", "offload_optimizer": True}
    asked: dict[str, Any] = {"strategy": strategy, "max_grad_norm": 0.5, "accumulation": 4}
    # In fp16 it begins so.
    asked["loss_scale"] = LossScale(growth_interval=1000)
    assert DeepSpeedPlugin().asked() == asked
    assert DeepSpeedPlugin(zero_stage=1).asked()["strategy"]["name"] == "zero1"

    def opened(given: Any) -> None:
        raise ConfigError(str(given))

    monkeypatch.setattr(current, "open", opened)
    with pytest.raises(ConfigError, match=re.escape(f"'strategy': {strategy}")):
        Accelerator()


def test_a_division_is_that_which_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch, FSDP_VERSION="1", FSDP_SHARDING_STRATEGY="2", FSDP_OFFLOAD_PARAMS="false",
           FSDP_RESHARD_AFTER_FORWARD="true", FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
           FSDP_TRANSFORMER_CLS_TO_WRAP="Block,Layer")  # fmt: skip
    found = FullyShardedDataParallelPlugin().options()
    assert found == {"name": "fsdp", "sharding": "grad_op", "wrap": ("Block", "Layer")}
    launch(monkeypatch, FSDP_VERSION="2", FSDP_OFFLOAD_PARAMS="true")
    found = FullyShardedDataParallelPlugin(auto_wrap_policy="no_wrap").options()
    assert found == {"name": "fsdp", "sharding": "full", "cpu_offload": True, "wrap": "none"}


def test_compilation_is_that_which_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch, DYNAMO_BACKEND="NO", DYNAMO_MODE="default", DYNAMO_USE_FULLGRAPH="False",
           DYNAMO_USE_REGIONAL_COMPILATION="False")  # fmt: skip
    assert TorchDynamoPlugin().compile() is False
    launch(monkeypatch, DYNAMO_BACKEND="EAGER")
    assert TorchDynamoPlugin().compile() == {"backend": "eager", "mode": "default"}


@pytest.mark.parametrize("name", ["USE_MEGATRON_LM", "USE_PARALLELISM_CONFIG"])
def test_what_has_no_counterpart_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch, **{name: "true"})
    with pytest.raises(ConfigError, match=name.removeprefix("USE_").lower()):
        Accelerator(cpu=True)
