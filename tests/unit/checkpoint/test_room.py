"""Copies in host memory: where there is room for them, and that they are kept."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from unipar.checkpoint import (
    HostCopies,
    PendingSave,
    copies,
    load,
    save_async,
    save_where_room,
    verify,
)
from unipar.utils.host_memory import HostMemory, host_memory
from unipar.world import World

MIB = 1 << 20


@pytest.fixture
def engines(make_engine: Callable[..., Any]) -> dict[str, Any]:
    return {"m": make_engine({"w": torch.ones(MIB // 4)}, {"w.exp_avg": torch.ones(MIB // 4)})}


@pytest.mark.parametrize(("available", "waits"), [(2 * MIB + 99, True), (2 * MIB + 100, False)])
def test_training_waits_where_a_host_has_no_room_for_the_copy(
    available: int,
    waits: bool,
    engines: dict[str, Any],
    tmp_path: Path,
    alone: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copies, "host_memory", lambda: HostMemory(1000, available))
    saved, short = save_where_room(tmp_path, engines, alone, step=1, copies=HostCopies())
    assert isinstance(saved, Path) == waits
    if isinstance(saved, PendingSave):
        assert short is None
        saved = saved.wait()
    else:
        assert "a copy of the training state takes 0.0 GiB of host" in str(short)
    verify(saved)


def test_the_copies_of_one_save_are_the_memory_of_the_next(
    engines: dict[str, Any], tmp_path: Path, alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = HostCopies()
    save_async(tmp_path, engines, alone, step=1, copies=kept).wait()
    # So that no room is needed for it.
    monkeypatch.setattr(copies, "host_memory", lambda: HostMemory(1000, 0))
    for weight in engines["m"].weights.values():
        weight.fill_(2)
    places = {tensor.data_ptr() for tensor in kept._held.values()}
    saved, short = save_where_room(tmp_path, engines, alone, step=2, copies=kept)
    assert isinstance(saved, PendingSave)
    assert short is None
    verify(saved.wait())
    assert {tensor.data_ptr() for tensor in kept._held.values()} == places
    assert torch.equal(kept._held[0, 0, 0], torch.full((MIB // 4,), 2.0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none")
def test_what_a_gpu_overwrites_after_a_save_was_copied_before(
    make_engine: Callable[..., Any], tmp_path: Path, alone: World
) -> None:
    """The copies are queued into pinned memory, before what changes the tensors."""
    kept, loaded = HostCopies(), make_engine({"w": torch.empty(16 * MIB)})
    engine = make_engine({"w": torch.ones(16 * MIB, device="cuda")})
    for step in (1, 2):
        engine.weights["w"].fill_(step)
        pending = save_async(tmp_path, {"m": engine}, alone, step=step, copies=kept)
        engine.weights["w"].fill_(-1)
        load(pending.wait(), {"m": loaded}, alone)
        assert torch.equal(loaded.weights["w"], torch.full((16 * MIB,), float(step)))
    assert kept._held[0, 0, 0].is_pinned()


def write(root: Path, group: str, **files: str) -> None:
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / group / name.replace("_", ".", 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


@pytest.mark.parametrize("seen", ["job/step", "of-the-host/job/step"])
def test_the_tightest_control_group_counts(seen: str, tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"0::/{seen}\n")
    write(tmp_path, "", memory_max="max", memory_current="9")
    top = "job" if seen == "job/step" else ""
    stat = {"memory_stat": "anon 1\ninactive_file 400"}
    write(tmp_path, top, memory_max="5000", memory_current="4500", **stat)
    assert host_memory(tmp_path) == HostMemory(5000, 900)


def test_the_host_itself_counts_where_no_group_has_a_limit(tmp_path: Path) -> None:
    found = host_memory(tmp_path)
    assert found.total == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < found.available <= found.total
