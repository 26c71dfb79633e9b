"""Runs on several hosts: network namespaces, which launchers reach as they would by ssh."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts import Hosts, two_hosts, usable

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not usable(), reason="takes root, and the command ip (Debian's iproute2)"),
]

SCRIPT = """
import json, os, subprocess, sys
import torch, unipar
from torch import nn

asked = json.loads(sys.argv[1])
steps = 0

def loss(model, batch):
    global steps
    steps += 1
    if steps == 3 and torch.distributed.get_rank() == asked.get("rank", 1):
        if "raises" in asked:
            raise ValueError(asked["raises"])
        if "runs" in asked:
            subprocess.run(asked["runs"], check=True)
    return nn.functional.mse_loss(model(batch[0]), batch[1])

torch.manual_seed(0)
x = torch.randn(64, 8)
result = unipar.fit(
    nn.Linear(8, 1), (x, x.sum(1, keepdim=True)), loss=loss, strategy="ddp", device="cpu",
    global_batch_size=16, steps=6, optimizer={"name": "sgd", "lr": 0.05}, progress=False,
    checkpoint=False, log_level="info", **asked["fit"],
)
print("LOSSES", json.dumps(result.losses))
"""
WRONG = """
import unipar.utils.version as version

found = version.own_versions
version.own_versions = lambda: found() | {"torch": "2.7.9"}
"""


class Cluster:
    """Two hosts, and a script that is started on the first of them."""

    def __init__(self, hosts: Hosts, directory: Path) -> None:
        self.hosts, self._directory = hosts, directory
        self._script = directory / "script.py"
        self._script.write_text(SCRIPT)
        self._runs = 0

    def torchrun(self, **options: Any) -> dict[str, Any]:
        names = list(self.hosts.names)
        launcher = {"name": "torchrun", "hosts": names, "ssh": str(self.hosts.agent), **options}
        return {"launcher": launcher, "num_nodes": 2, "devices": 1}

    def mpi(self) -> dict[str, Any]:
        agent = ["--mca", "plm_rsh_agent", str(self.hosts.agent)]
        launcher = {"name": "mpi", "hosts": list(self.hosts.names), "arguments": agent}
        return {"launcher": launcher, "num_nodes": 2, "devices": 1}

    def command(self, fit: dict[str, Any], **asked: Any) -> list[str]:
        self._runs += 1
        output = str(self._directory / f"run-{self._runs}")
        given = json.dumps({"fit": {"timeout": 60, "output_dir": output, **fit}, **asked})
        return self.hosts.inside(0, sys.executable, str(self._script), given)

    def run(self, fit: dict[str, Any], **asked: Any) -> subprocess.CompletedProcess[str]:
        command = self.command(fit, **asked)
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert self.ended(), "processes are left on the hosts"
        return done

    def ended(self) -> bool:
        deadline = time.monotonic() + 10
        while self.hosts.processes():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def losses(self, fit: dict[str, Any]) -> list[float]:
        done = self.run(fit)
        found = re.search(r"^LOSSES (.*)$", done.stdout, re.MULTILINE)
        assert found, done.stdout + done.stderr
        return json.loads(found[1])

    def error(self, fit: dict[str, Any], **asked: Any) -> str:
        """The error that the caller gets."""
        done = self.run(fit, **asked)
        assert done.returncode, done.stdout
        return done.stderr.rsplit("unipar.errors.", 1)[-1]


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with two_hosts(tmp_path, **getattr(request, "param", {})) as hosts:
        yield Cluster(hosts, tmp_path)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of two processes that ``fit`` starts on one machine."""
    directory = tmp_path_factory.mktemp("expected")
    with two_hosts(directory) as hosts:
        return Cluster(hosts, directory).losses({"launcher": "local", "devices": 2})


def test_torchrun_on_two_hosts(cluster: Cluster, expected: list[float]) -> None:
    fit = cluster.torchrun()
    done = cluster.run(fit)
    assert f"LOSSES {json.dumps(expected)}" in done.stdout, done.stderr
    # And not the one of the two that the system names first.
    output = "".join(
        path.read_text() for path in Path(cluster._directory).glob("run-1/launch/*/*/rank-0.log")
    )
    assert "network: cable0 (10.77.1.1) leads to the other hosts" in output + done.stdout


def test_mpi_on_two_hosts(cluster: Cluster, expected: list[float]) -> None:
    assert cluster.losses(cluster.mpi()) == expected


NETWORKS = [{"version": 6}, {"own_name_is_loopback": True}]


@pytest.mark.parametrize("cluster", NETWORKS, ids=["ipv6", "debian"], indirect=True)
@pytest.mark.parametrize("launcher", ["torchrun", "mpi"])
def test_other_networks(cluster: Cluster, expected: list[float], launcher: str) -> None:
    assert cluster.losses(getattr(cluster, launcher)()) == expected


@pytest.mark.parametrize("launcher", ["torchrun", "mpi"])
def test_an_error_on_the_second_host_is_the_callers(cluster: Cluster, launcher: str) -> None:
    error = cluster.error(getattr(cluster, launcher)(), raises="bad batch")
    assert re.match(r"WorkerError: Rank 1 of 2 .*ValueError: bad batch", error)


def test_a_cable_that_is_cut_ends_the_run(cluster: Cluster) -> None:
    cut = ["ip", "-n", cluster.hosts.names[0], "link", "set", cluster.hosts.cable, "down"]
    began = time.monotonic()
    error = cluster.error({**cluster.torchrun(), "timeout": 5}, rank=0, runs=cut)
    assert re.search(r"Link or host: .*cannot be reached from", error)
    assert time.monotonic() - began < 90


@pytest.mark.parametrize("cluster", [{"apart": True}], ids=["apart"], indirect=True)
def test_a_host_that_cannot_be_reached(cluster: Cluster) -> None:
    error = cluster.error({**cluster.torchrun(), "timeout": 8})
    first, second = cluster.hosts.names
    assert re.search(rf"torchrun on {second} exited .*\n(.*\n)*This host does not reach", error)
    assert f"the first one, {first} at port" in error


def test_a_host_that_ssh_does_not_reach(cluster: Cluster) -> None:
    fit = cluster.torchrun(hosts=[cluster.hosts.names[0], "nowhere"])
    error = cluster.error({**fit, "grace_period": 3})
    assert re.match(r"WorkerError: Rank 1 of 2 ended without a word: torchrun on nowhere ", error)
    assert 'Cannot open network namespace "nowhere"' in error


def test_a_host_with_another_version(cluster: Cluster, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text(WRONG)
    wrapper = tmp_path / "python"
    # An interpreter of the second host alone.
    wrapper.write_text(
        "#!/bin/sh\n"
        f"ip address show {cluster.hosts.cable} | grep -q 10.77.1.2 && "
        f"export PYTHONPATH={other}:$PYTHONPATH\n"
        f'exec {sys.executable} "$@"\n'
    )
    wrapper.chmod(0o755)
    error = cluster.error(cluster.torchrun(python=str(wrapper)))
    assert re.match(r"WorkerError: Rank 1 of 2 ended without a word: torchrun on ", error)
    assert re.search(r"has torch 2\.7\.9, not 2\.\d+", error)


@pytest.mark.parametrize("launcher", ["torchrun", "mpi"])
def test_nothing_is_left_when_the_caller_is_killed(
    cluster: Cluster, launcher: str, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    runs = ["sh", "-c", f"touch {there}; sleep 100"]
    # It becomes the process of the script.
    caller = subprocess.Popen(cluster.command(getattr(cluster, launcher)(), runs=runs))
    try:
        while not there.exists():
            assert caller.poll() is None
            time.sleep(0.1)
    finally:
        caller.kill()
        caller.wait()
    assert cluster.ended()
