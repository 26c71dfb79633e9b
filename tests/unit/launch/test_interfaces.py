from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest

from unipar.world import meeting, network
from unipar.world.network import VARIABLES, Arrival, interface_with, some_of_each


def choose_interface(rank: int, arrivals: list[Arrival], port: int) -> None:
    """As ranks do that were told of a few of all."""
    few = some_of_each(arrivals)
    network.choose_interface(arrivals[rank], few, port, main=rank == 0)


V4, V6 = socket.AF_INET, socket.AF_INET6


@pytest.fixture(autouse=True)
def interfaces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two of them besides the loopback, and no variable set."""
    found = {
        "lo": [(V4, "127.0.0.1"), (V6, "::1")],
        "eth0": [(V4, "192.168.0.7"), (V6, "fe80::7%eth0")],
        "eth1": [(V4, "10.0.0.1"), (V6, "fd00::1")],
    }
    told = {
        name: [SimpleNamespace(family=family, address=address) for family, address in its]
        for name, its in found.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: told)
    monkeypatch.setattr(network, "_chosen", {})
    before = dict(os.environ)
    for name in VARIABLES:
        os.environ.pop(name, None)
    yield
    os.environ.clear()
    os.environ.update(before)


def chosen() -> dict[str, str]:
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


ETH1 = {"GLOO_SOCKET_IFNAME": "eth1", "TP_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}


@pytest.mark.parametrize(
    ("address", "name"),
    [("10.0.0.1", "eth1"), ("fd00::1", "eth1"), ("fe80::7", "eth0"), ("10.0.0.2", None)],
)
def test_the_interface_that_has_an_address(address: str, name: str | None) -> None:
    assert interface_with(address) == name


@pytest.mark.parametrize("addresses", [("10.0.0.1", "10.0.0.2"), ("fd00::1", "fd00::2")])
def test_the_interface_towards_the_meeting_point_is_taken(addresses: tuple[str, str]) -> None:
    here, there = addresses
    choose_interface(0, [Arrival("a", "a", here), Arrival("b", "b", there)], 1)
    assert chosen() == ETH1


def test_the_host_of_the_meeting_point_looks_for_the_way_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ways = {("10.0.0.2", 29500): "10.0.0.1"}
    monkeypatch.setattr(network, "address_towards", ways.__getitem__)
    near = Arrival("a", "a", "127.0.0.1")
    choose_interface(0, [near, near, Arrival("b", "b", "10.0.0.2")], 29500)
    assert chosen() == ETH1


@pytest.mark.skipif(sys.platform != "linux", reason="the loopback has another name elsewhere")
def test_on_one_machine_gloo_takes_the_loopback() -> None:
    choose_interface(0, [Arrival("a", "a", "192.168.0.7")] * 2, 1)
    assert chosen() == {"GLOO_SOCKET_IFNAME": "lo"}


def test_what_the_user_has_set_stays(caplog: pytest.LogCaptureFixture) -> None:
    os.environ["NCCL_SOCKET_IFNAME"] = "ib"
    with caplog.at_level("INFO"):
        choose_interface(0, [Arrival("a", "a", "10.0.0.1"), Arrival("b", "b", "10.0.0.2")], 1)
    assert chosen() == {**ETH1, "NCCL_SOCKET_IFNAME": "ib"}
    assert "eth1 (10.0.0.1) leads to the other hosts" in caplog.text
    assert "set by the user: NCCL_SOCKET_IFNAME=ib" in caplog.text


def test_what_an_earlier_run_has_chosen_is_not_the_users() -> None:
    far = Arrival("b", "b", "10.0.0.2")
    choose_interface(0, [Arrival("a", "a", "192.168.0.7"), far], 1)
    choose_interface(0, [Arrival("a", "a", "10.0.0.1"), far], 1)
    assert chosen() == ETH1


def test_an_interface_that_cannot_be_told_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    choose_interface(0, [Arrival("a", "a", ""), Arrival("b", "b", "")], 0)
    assert chosen() == {}
    assert "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME" in caplog.text


def test_versions_that_differ_are_named_with_their_hosts() -> None:
    def arrival(host: str, torch: str) -> Arrival:
        return Arrival(host, host, "", {"Python": "3.11", "torch": torch})

    same = [arrival("a", "2.13.0"), arrival("b", "2.13.0")]
    assert meeting._different_versions(same) is None
    told = meeting._different_versions([*same, arrival("c", "2.12.1")])
    assert told is not None
    assert "torch: 2.13.0 on a (rank 0), b (rank 1); 2.12.1 on c (rank 2)" in told
    assert "Python" not in told
