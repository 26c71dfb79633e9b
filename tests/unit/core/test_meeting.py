"""Ranks that meet, or wait for one that never comes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from unipar.world import Placement, meeting

SIZE = 8


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What keys were looked for, one by one."""
    keys: list[list[str]] = []
    check = TCPStore.check

    def counted(self: Any, wanted: list[str]) -> bool:
        keys.append(wanted)
        return check(self, wanted)

    monkeypatch.setattr(TCPStore, "check", counted)
    return keys


def test_all_learn_at_once_who_never_came(asked: list[list[str]]) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ended: dict[int, tuple[float, str]] = {}

    def come(rank: int) -> None:
        store = TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=30))
        placement = Placement(rank=rank, size=SIZE, timeout=1.0 if rank == 3 else 30.0)
        try:
            meeting.come(store, placement, 1)
        except dist.DistStoreError as error:
            ended[rank] = time.monotonic(), str(error)

    began = time.monotonic()
    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(SIZE) if rank != 5]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(ended) == [0, 1, 2, 3, 4, 6, 7]
    texts = {text for _, text in ended.values()}
    assert len(texts) == 1
    assert "rank 3 of 8 waited for the others" in texts.pop()
    assert all("Rank 5 has begun none." in text for _, text in ended.values())
    # Those that would wait for longer did not.
    assert max(when for when, _ in ended.values()) - began < 15
    # One of them looked.
    assert len(asked) <= SIZE + 1


def with_open_files(soft: int, hard: int, ranks: int) -> str:
    """What rank 0 of so many says, which no other comes to; and how many connected at once."""
    code = f"""
import contextlib, resource, socket
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
import torch.distributed as dist
from unipar.errors import ConfigError
from unipar.world import Placement, meeting
place = Placement(rank=0, size={ranks}, timeout=1.0, init_method="tcp://127.0.0.1:0")
try:
    meeting.meet(place)
except (ConfigError, dist.DistStoreError) as error:
    print(type(error).__name__, error)
with contextlib.suppress(OSError):
    opened = []
    while len(opened) < 1000:
        opened.append(socket.socket())
print(len(opened))
"""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.skipif(sys.platform == "win32", reason="no limit of open files there")
def test_a_process_may_have_a_connection_to_each_rank() -> None:
    said, opened = with_open_files(64, 4096, 200).rsplit("\n", 2)[:2]
    assert said.startswith("DistStoreError")
    assert int(opened) > 800  # Not only to each: the other groups and data have some as well.


@pytest.mark.skipif(sys.platform == "win32", reason="no limit of open files there")
def test_more_ranks_than_a_process_may_have_connections_are_refused() -> None:
    said = with_open_files(64, 100, 200)
    assert "ConfigError 200 ranks need as many connections" in said
    assert "may open 100 files" in said
    assert "ulimit -Hn" in said
