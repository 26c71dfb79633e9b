"""A rank that waits says so, and where; it waits for a host's name, too."""

from __future__ import annotations

import logging
import socket
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from unipar import ConfigError
from unipar.world import Placement, meeting, waits


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "QUIET", 0.2)
    monkeypatch.setattr(waits, "_AGAIN", 0.1)
    monkeypatch.setattr(meeting, "QUIET", 0.2)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.mark.usefixtures("soon")
def test_a_name_may_come_late(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[str] = []

    def look_up(host: str, port: Any) -> list[Any]:
        asked.append(host)
        if len(asked) < 5:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return []

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with caplog.at_level(logging.WARNING, "unipar"):
        waits.await_name("node-0.job", 20)
    assert asked == ["node-0.job"] * 5
    [said] = [record.getMessage() for record in caplog.records]
    assert "knows no host 'node-0.job', where the ranks meet (Name or service not known)" in said
    assert "waits for up to 20 s" in said
    assert "set MASTER_ADDR to rank 0's host" in said


@pytest.mark.usefixtures("soon")
def test_a_name_that_never_comes_is_an_error() -> None:
    with pytest.raises(dist.DistStoreError, match=r"no host 'none\.invalid'.* Set MASTER_ADDR"):
        waits.await_name("none.invalid", 0.5)
    with pytest.raises(ConfigError, match="is no name of a host"):
        waits.await_name("a" * 70, 0.5)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    ("rank", "said"),
    [
        (0, "rank 0 waits at 127.0.0.1, port {}, and has not heard from all 2 ranks {}. Start"),
        (1, "rank 1 of 2 has not reached rank 0 at 127.0.0.1, port {}, {}. Rank 0 may not have"),
    ],
)
def test_ranks_say_where_they_wait_alone(
    rank: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    placement = Placement(rank, 2, init_method=f"tcp://127.0.0.1:{port}", timeout=1.0)
    with (
        caplog.at_level(logging.WARNING, "unipar"),
        pytest.raises(dist.DistStoreError) as raised,
    ):
        meeting.meet(placement)
    before, after = said.format(port, "|").split("|")
    assert str(raised.value).startswith(f"{before}within 1 s (")
    assert after[2:] in str(raised.value)
    [warned] = [record.getMessage() for record in caplog.records]
    assert warned.startswith(f"{before}in 0.2 s; it waits for up to 1 s{after}")


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        placement = Placement(0, 2, init_method=f"tcp://127.0.0.1:{port}", timeout=5.0)
        said = rf"cannot serve the others at 127.0.0.1, port {port} \(.*Set MASTER_ADDR to its own"
        with pytest.raises(dist.DistNetworkError, match=said):
            meeting.meet(placement)


def test_a_host_that_is_not_given_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ValueError, match="environment variable MASTER_ADDR expected"):
        meeting.meet(Placement(0, 2, init_method="env://", timeout=60.0))


@pytest.mark.usefixtures("soon")
def test_rank_0_says_who_is_late(caplog: pytest.LogCaptureFixture) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def come(rank: int) -> None:
        store = TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=30))
        meeting.come(store, Placement(rank, 3, timeout=20.0), 1)

    with caplog.at_level(logging.WARNING, "unipar"):
        threads = [threading.Thread(target=come, args=(rank,)) for rank in (0, 2)]
        for thread in threads:
            thread.start()
        threading.Event().wait(1.0)
        come(1)
        for thread in threads:
            thread.join(20)
    [said] = [record.getMessage() for record in caplog.records]
    assert said == ("of 3 ranks rank 1 has not come in 0.2 s. The others wait for up to 20 s.")
