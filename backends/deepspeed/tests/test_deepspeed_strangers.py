"""Files of DeepSpeed's that were edited, or made up, are refused by name."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from measure.fuzzing.fuzz import TESTED, Tally, attempt, bounded, check_valid, fuzz
from measure.fuzzing.readers import DeepSpeedReader
from unipar.errors import CheckpointError
from unipar_deepspeed import files, saved


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> DeepSpeedReader:
    made = DeepSpeedReader(tmp_path_factory.mktemp("deepspeed"))
    check_valid(made)
    return made


@settings(
    max_examples=300,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(random=st.randoms(use_true_random=True))
def test_edits_are_refused_by_name(reader: DeepSpeedReader, random: Random) -> None:
    tally = Tally()
    try:
        with bounded():
            attempt(reader, random, tally)
    finally:
        # The tests that follow read the same files.
        reader.restore()
    assert not tally.worst, next(iter(tally.worst.values()))


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_many_edits_are_refused_by_name(tmp_path: Path) -> None:
    tally = fuzz(DeepSpeedReader(tmp_path), TESTED, seed=1)
    assert not tally.worst, "\n".join(tally.worst.values())


@pytest.mark.parametrize("name", ["../outside/global_step10", "/", "..", "", "no such step"])
def test_latest_leads_nowhere_else(reader: DeepSpeedReader, tmp_path: Path, name: str) -> None:
    (tmp_path / "latest").write_text(name)
    with pytest.raises(CheckpointError, match="latest"):
        saved.read(tmp_path)


def test_a_link_out_of_the_checkpoint_is_not_followed(
    reader: DeepSpeedReader, tmp_path: Path
) -> None:
    (tmp_path / "step").symlink_to(reader.place / "stage1")
    (tmp_path / "latest").write_text("step")
    with pytest.raises(CheckpointError, match=r"step is a link that leads out of"):
        saved.read(tmp_path)
    # As the place that is asked for, it is the user's own.
    assert list(saved.read(tmp_path / "step").weights)


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"model\.pt is a FIFO"):
        files.load(tmp_path / "model.pt")


class Allocates:
    def __reduce__(self) -> Any:
        return bytearray, (10**11,)


def test_a_few_bytes_allocate_nothing_large(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    torch.save({"module": Allocates()}, file)
    with bounded(), pytest.raises(CheckpointError, match=r"not unpickled.*bytearray"):
        files.load(file)


def test_what_is_compressed_is_refused(tmp_path: Path) -> None:
    plain, file = tmp_path / "plain.pt", tmp_path / "model.pt"
    torch.save({"module": {}}, plain)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    with pytest.raises(CheckpointError, match=r"model\.pt is damaged: parts of it are compressed"):
        files.load(file)
