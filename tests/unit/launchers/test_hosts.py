from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from unipar import launchers
from unipar.errors import ConfigError
from unipar.launchers import Task


def task(**given: Any) -> Task:
    defaults: dict[str, Any] = {
        "fn": lambda placement: None,
        "devices": 2,
        "num_nodes": 2,
        "device_type": "cpu",
        "timeout": 59.5,
        "max_restarts": 0,
        "grace_period": 1.0,
        "save_signal": None,
        "directory": Path("/shared/run"),
    }
    return Task(**{**defaults, **given})


def test_each_host_is_reached_once_and_gets_one_line_for_its_shell() -> None:
    launcher = launchers.resolve(
        {"name": "torchrun", "hosts": ["me@a", "b"], "ssh": "ssh -p 2222", "python": "/opt/my py"}
    )
    first, second = launcher.commands(task())  # pyright: ignore[reportAttributeAccessIssue]
    assert first[:-1] == ["ssh", "-p", "2222", "me@a"]
    assert second[:-1] == ["ssh", "-p", "2222", "b"]
    words = shlex.split(second[-1])
    assert words[0] == "/opt/my py"
    given = json.loads(words[-1])
    # The others reach the first by its name, and no user is part of that.
    assert (given["address"], given["node"], given["nodes"], given["devices"]) == ("a", 1, 2, 2)
    assert given["timeout"] == 60


def test_this_machine_alone_takes_no_ssh() -> None:
    launcher = launchers.resolve("torchrun")
    (command,) = launcher.commands(task(num_nodes=1))  # pyright: ignore[reportAttributeAccessIssue]
    assert "ssh" not in command
    assert json.loads(command[-1])["address"] == "127.0.0.1"


@pytest.mark.parametrize("name", ["torchrun", "mpi"])
def test_hosts_are_as_many_as_nodes_and_each_another_one(name: str) -> None:
    options = {"mpirun": "true"} if name == "mpi" else {"ssh": "true"}
    named = launchers.resolve({"name": name, "hosts": ["a", "b"], **options})
    named.check(1, 2, "cpu")
    with pytest.raises(ConfigError, match=r"num_nodes=1, .* has 2 hosts \(a, b\)"):
        named.check(1, 1, "cpu")
    twice = launchers.resolve({"name": name, "hosts": ["a", "a"], **options})
    with pytest.raises(ConfigError, match="one of them twice"):
        twice.check(1, 2, "cpu")
    here = launchers.resolve({"name": name, **options})
    with pytest.raises(ConfigError, match=r"num_nodes=2, .* has 1 host \(this one\)"):
        here.check(1, 2, "cpu")


def test_a_command_that_is_not_there_is_refused() -> None:
    launcher = launchers.resolve({"name": "torchrun", "hosts": ["a", "b"], "ssh": "no-such-ssh -v"})
    with pytest.raises(ConfigError, match="ssh='no-such-ssh -v', and there is no such command"):
        launcher.check(1, 2, "cpu")


def test_a_port_is_one() -> None:
    with pytest.raises(ConfigError, match="port"):
        launchers.resolve("torchrun:port=70000")


def test_mpirun_takes_no_addresses_of_ipv6() -> None:
    launcher = launchers.resolve({"name": "mpi", "hosts": ["fd00::1", "b"], "mpirun": "true"})
    with pytest.raises(ConfigError, match="Give a name that leads to that address"):
        launcher.check(1, 2, "cpu")
