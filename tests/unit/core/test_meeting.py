"""Ranks that meet, or wait for one that never comes."""

from __future__ import annotations

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
