"""How a script asks for its fp16 losses to be scaled is how the run scales them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unipar.compat import deepspeed
from unipar.compat.accelerate import Accelerator, DeepSpeedPlugin
from unipar.compat.accelerate.utils import GradScalerKwargs
from unipar.compat.colossalai.booster import Booster
from unipar.compat.colossalai.booster.mixed_precision import FP16TorchMixedPrecision
from unipar.compat.colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin
from unipar.compat.deepspeed_config import read_config
from unipar.compat.fabric import Fabric
from unipar.compat.fabric.plugins import MixedPrecision
from unipar.compat.fabric.strategies import DeepSpeedStrategy
from unipar.compat.native.scaling import GradScaler
from unipar.compat.run import current
from unipar.errors import ConfigError
from unipar.strategy import LossScale

pytestmark = pytest.mark.usefixtures("alone")

OF_DEEPSPEED = LossScale(initial=2.0**16, growth_interval=1000)
FP16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
AS_ASKED = LossScale(initial=256, growth_interval=2)
STATIC = LossScale(initial=128, growth_factor=1, backoff_factor=1)


def initialize(**config: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    sgd = {"type": "SGD", "params": {"lr": 1e-3}}
    settings = {"train_batch_size": 4, "optimizer": sgd, "gradient_clipping": 0, **config}
    return deepspeed.initialize(model=model, config=settings)[0]


def accelerate(*handlers: Any, precision: str | None = "fp16", **given: Any) -> Any:
    return Accelerator(cpu=True, mixed_precision=precision, kwargs_handlers=list(handlers), **given)


def by_deepspeed(precision: str | None = "fp16", **config: Any) -> Any:
    settings = {"zero_optimization": {"stage": 0}, **config}
    return accelerate(precision=precision, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings))


def fabric(strategy: Any = "auto", **given: Any) -> Any:
    made = Fabric(accelerator="cpu", devices=1, strategy=strategy, **given)
    made.launch()
    return made


def scaler(kind: Any = torch.amp.GradScaler) -> Any:
    return kind("cpu", init_scale=256.0, growth_interval=2)


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (lambda: initialize(fp16=FP16), AS_ASKED),
        (lambda: initialize(fp16={"enabled": True}), OF_DEEPSPEED),
        (lambda: initialize(fp16={**FP16, "loss_scale": 128}), STATIC),
        (lambda: initialize(torch_autocast={"enabled": True, "dtype": "float16"}), None),
        (lambda: initialize(fp16={**FP16, "enabled": False}), None),
        (lambda: initialize(bf16={"enabled": True}), None),
        (lambda: accelerate(GradScalerKwargs(init_scale=256.0, growth_interval=2)), AS_ASKED),
        (lambda: accelerate(GradScalerKwargs(init_scale=256.0), precision="bf16"), None),
        (lambda: by_deepspeed(fp16={**FP16, "enabled": "auto"}), AS_ASKED),
        (lambda: by_deepspeed(), OF_DEEPSPEED),
        (lambda: by_deepspeed("no"), None),
        (lambda: fabric(plugins=MixedPrecision("16-mixed", "cpu", scaler())), AS_ASKED),
        (lambda: fabric(plugins=MixedPrecision("16-mixed", "cpu", scaler(GradScaler))), AS_ASKED),
        (lambda: fabric(precision="16-mixed"), None),
        (lambda: Booster(mixed_precision=FP16TorchMixedPrecision(256.0, growth_interval=2)),
         AS_ASKED),
        (lambda: Booster(plugin=LowLevelZeroPlugin(initial_scale=256, growth_interval=2)),
         AS_ASKED),
        (lambda: Booster(plugin=LowLevelZeroPlugin()),
         LossScale(initial=2.0**32, growth_interval=1000)),
        (lambda: Booster(plugin=GeminiPlugin(precision="bf16")), None),
    ],
)  # fmt: skip
def test_a_script_says_how_losses_are_scaled(
    start: Any, expected: LossScale | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIPAR_STRATEGY", "single")
    start()
    assert current.config is not None
    assert current.config.loss_scale == expected
    start()  # Twice the same is no contradiction.


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, OF_DEEPSPEED),
        ({"initial_scale_power": 8, "loss_scale_window": 2}, AS_ASKED),
        ({"loss_scale": 128, "min_loss_scale": 2}, STATIC),
        ({"config": {"fp16": FP16}, "initial_scale_power": 4}, AS_ASKED),
    ],
)
def test_fabrics_deepspeed_scales_as_its_arguments_say(
    asked: Any, expected: LossScale, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIPAR_STRATEGY", "single")
    fabric(DeepSpeedStrategy(**asked), precision="16-mixed")
    assert current.config is not None
    assert current.config.loss_scale == expected


def test_unipar_yaml_wins_and_may_be_the_one_to_say_fp16(tmp_path: Path) -> None:
    (tmp_path / "unipar.yaml").write_text("precision: fp16\nstrategy: single\n")
    accelerate(GradScalerKwargs(init_scale=256.0, growth_interval=2), precision=None)
    assert current.config is not None
    assert current.config.loss_scale == AS_ASKED
    current.close()
    (tmp_path / "unipar.yaml").write_text("loss_scale: {initial: 8}\nstrategy: single\n")
    initialize(fp16=FP16)
    assert current.config.loss_scale == LossScale(initial=8)
    current.close()
    with pytest.raises(ConfigError, match="loss_scale is given, and precision is 'fp32'"):
        initialize()


@pytest.mark.parametrize("static", [False, True])
def test_an_overflow_changes_the_scale_as_asked(static: bool) -> None:
    engine = initialize(fp16={**FP16, "loss_scale": 128} if static else FP16)
    small, large = torch.ones(4, 3), torch.full((4, 3), 1e4)
    for x in (small, large, small, small):
        engine.backward(engine(x).float().square().mean())
        engine.step()
    assert engine.skipped_steps == 1
    assert current.session is not None
    (own,) = current.session.engines.values()
    stored = own.export_state().extra["scaler"]
    assert stored["scale"] == (128.0 if static else 256.0)


def test_what_is_not_kept_is_said(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("unipar").propagate = True
    read_config({"fp16": {**FP16, "hysteresis": 1, "min_loss_scale": 1}})
    read_config({"fp16": {**FP16, "hysteresis": 4, "loss_scale": 2}})
    LowLevelZeroPlugin(hysteresis=1, min_scale=0)
    LowLevelZeroPlugin(hysteresis=4, precision="fp32")
    assert caplog.messages == []
    read_config({"fp16": {**FP16, "hysteresis": 4, "consecutive_hysteresis": True}})
    assert [text.partition(".")[0] for text in caplog.messages] == [
        "DeepSpeed's fp16 has 'hysteresis'", "DeepSpeed's fp16 has 'consecutive_hysteresis'",
    ]  # fmt: skip
    caplog.clear()
    LowLevelZeroPlugin(hysteresis=4, min_scale=2)
    assert "LowLevelZeroPlugin(min_scale=…, hysteresis=…) is not kept" in caplog.text


class Own(torch.amp.GradScaler):
    pass


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: accelerate(GradScalerKwargs(enabled=False)), "Leave enabled out"),
        (lambda: accelerate(GradScalerKwargs(growth_factor=0.5)),
         r"loss_scale\.growth_factor: 0\.5 was given"),
        (lambda: read_config({"fp16": {"loss_scale": -1}}), r"loss_scale\.initial: -1 was given"),
        (lambda: read_config({"fp16": {"initial_scale_power": 2000}}), r"loss_scale\.initial: 1"),
        (lambda: read_config({"fp16": {"loss_scale_window": 0}}), r"growth_interval: 0 was given"),
        (lambda: MixedPrecision("16-mixed", "cpu", Own("cpu")), r"MixedPrecision\(scaler=…\) has"),
        (lambda: MixedPrecision("bf16-mixed", "cpu", scaler()), r"MixedPrecision\(scaler=…\) has"),
        (lambda: MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", enabled=False)),
         "Give a torch.amp.GradScaler, or leave it out"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused(ask: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ask()
