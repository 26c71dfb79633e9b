"""The self-test finds what is wrong: by ``unipar doctor``, and by itself before a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import unipar
from unipar.cli import main
from unipar.errors import ConfigError

STRATEGIES = """
from dataclasses import replace

import broken_strategies as broken
from unipar.strategy import Availability
from unipar_torch.ddp import DDPOptions, DDPStrategy
from unipar_torch.fsdp import FSDPOptions


class SummedOptions(DDPOptions):
    strategy = "summed"


class Summed(DDPStrategy):
    name = "summed"
    options_type = SummedOptions

    def prepare(self, spec, world):
        engine = super().prepare(spec, world)
        engine.reducer.__class__ = broken.GradientsSummed
        return engine


class EarlyOptions(FSDPOptions):
    strategy = "early"


class Early(broken.EarlyOptimizerStrategy):
    name = "early"
    options_type = EarlyOptions

    def prepare(self, spec, world):
        return super().prepare(replace(spec, model=spec.model()), world)


class AbsentOptions(DDPOptions):
    strategy = "absent"


class Absent(DDPStrategy):
    name = "absent"
    options_type = AbsentOptions

    @classmethod
    def availability(cls):
        return Availability(False, "Absent is not installed.", "pip install absent")
"""


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "unipar_madebad.py").write_text(STRATEGIES)
    info = tmp_path / "unipar_madebad-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: unipar-madebad\nVersion: 1.0\n")
    entries = [f"{name.lower()} = unipar_madebad:{name}" for name in ("Summed", "Early", "Absent")]
    (info / "entry_points.txt").write_text("\n".join(["[unipar.strategies]", *entries, ""]))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told(capfd: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--self-test", "--json", *flags])
    return code, {one["strategy"]: one for one in json.loads(capfd.readouterr().out)}


@pytest.mark.usefixtures("broken")
def test_doctor_tells_gradients_that_are_summed_by_both_losses(
    capfd: pytest.CaptureFixture[str],
) -> None:
    code, found = told(capfd, "--strategy", "summed", "--strategy", "absent")
    assert code == 1
    assert found["summed"]["verdict"] == "differs"
    # The first loss is before any gradient.
    assert found["summed"]["step"] == 2
    compared = found["summed"]["compared"]
    assert compared["devices"] == 2
    assert compared["losses"][0] == pytest.approx(compared["expected"][0], rel=1e-6)
    assert compared["losses"][1] != pytest.approx(compared["expected"][1], rel=1e-2)
    assert found["absent"]["verdict"] == "not run"
    assert found["absent"]["why"] == "Absent is not installed. pip install absent"


def test_a_run_refuses_a_strategy_that_trains_otherwise(broken: Path) -> None:
    with pytest.raises(ConfigError, match=r"step 2 under 'early' on 1 cpu process has loss 0\.\d+"):
        unipar.fit(
            torch.nn.Linear(4, 1),
            torch.randn(8, 4),
            loss=lambda model, batch: model(batch).square().mean(),
            strategy="early",
            device="cpu",
            global_batch_size=8,
            steps=1,
            output_dir=broken / "run",
            self_test=True,
            progress=False,
        )
    (record,) = (broken / "cache/unipar/self-tests").glob("*.json")
    assert json.loads(record.read_text())["outcome"]["verdict"] == "differs"
