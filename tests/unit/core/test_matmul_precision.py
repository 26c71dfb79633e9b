"""How exactly fp32 products are computed is a setting of a run, and nothing is left of it after."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unipar
from unipar.config import RunConfig
from unipar.errors import ConfigError

now = torch.get_float32_matmul_precision


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    before = now()
    yield
    assert now() == before


def test_a_session_sets_it_and_takes_it_back() -> None:
    with unipar.Session("single", device="cpu", float32_matmul_precision="medium"):
        assert now() == "medium"
    with unipar.Session("single", device="cpu"):
        assert now() == "highest"


def test_an_error_takes_it_back_too() -> None:
    session = unipar.Session("single", device="cpu", float32_matmul_precision="high")
    with pytest.raises(ZeroDivisionError), session:
        raise ZeroDivisionError


def test_a_run_that_cannot_begin_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    session = unipar.Session("single", device="cpu", float32_matmul_precision="high")

    def broken(placement: Any) -> None:
        assert now() == "high"
        raise ConfigError("no")

    monkeypatch.setattr(session.strategy, "setup", broken)
    with pytest.raises(ConfigError, match="no"), session:
        pass


def test_fit_trains_with_it_and_records_it(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Recording(unipar.Callback):
        def on_run_start(self, run: Any) -> None:
            seen.append(run.config["float32_matmul_precision"])

    def loss(model: Any, batch: Any) -> torch.Tensor:
        seen.append(now())
        return model(batch).sum()

    unipar.fit(
        nn.Linear(2, 1),
        torch.zeros(4, 2),
        loss=loss,
        callbacks=[Recording()],
        strategy="single",
        device="cpu",
        devices=1,
        global_batch_size=4,
        float32_matmul_precision="high",
        output_dir=tmp_path,
        checkpoint=False,
        progress=False,
    )
    assert seen == ["high", "high"]


def test_a_wrong_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="'highest', 'high', 'medium' or null"):
        RunConfig.build(float32_matmul_precision="tf32")


def test_torchs_other_way_to_set_it_is_not_mixed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise RuntimeError("mix of the legacy and new APIs")

    session = unipar.Session("single", device="cpu", float32_matmul_precision="high")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_float32_matmul_precision", refuse)
        with pytest.raises(ConfigError, match="Leave one of them out"), session:
            pass
