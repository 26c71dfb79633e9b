"""What a folded script saves after training."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from unipar import launch
from unipar.migrated import folded


class Pretrained(nn.Linear):
    def save_pretrained(self, directory: Path, *, name: str) -> None:
        (directory / name).write_text("weights")


@pytest.mark.parametrize(("rank", "written"), [("0", True), ("1", False)])
def test_one_process_saves_a_pretrained_model(
    rank: str, written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost", "MASTER_PORT": "1",
    }  # fmt: skip
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    assert launch.detect() is not None
    folded.save_pretrained(Pretrained(1, 1), tmp_path, name="model.bin")
    assert (tmp_path / "model.bin").exists() is written
