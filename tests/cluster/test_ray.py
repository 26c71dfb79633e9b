"""Launcher ``ray`` on a real cluster of two raylets, which stand for two nodes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from unipar.callbacks.loggers import read_metrics

pytestmark = [
    pytest.mark.extra,
    pytest.mark.skipif(find_spec("pyarrow") is None, reason="the extra 'ray' is not installed"),
    pytest.mark.timeout(240),
]
EXAMPLE = Path(__file__).parents[2] / "examples" / "tune.py"

SCRIPT = """
import json, os, sys, time
import torch
import unipar
from torch import nn

arguments = json.loads(sys.argv[1])
fault = arguments.pop("fault", "")
marks = arguments["output_dir"] + "-marks"
os.makedirs(marks, exist_ok=True)
calls = 0

def loss(model, batch):
    global calls
    calls += 1
    rank, again = torch.distributed.get_rank(), os.path.exists(marks + "/failed")
    with open(f"{marks}/{rank}", "w") as file:
        place = [os.environ.get("GROUP_RANK"), os.environ["LOCAL_RANK"], os.getpid()]
        json.dump([*place, os.environ.get("KIND"), len(batch[0])], file)
    if fault in ("raise", "kill", "leave") and rank == 1 and calls == 5 and not again:
        open(marks + "/failed", "w").close()
        if fault == "raise":
            raise ValueError("boom on one")
        if fault == "leave":
            os._exit(0)
        os.kill(os.getpid(), 9)
    if fault == "waits" and rank == torch.distributed.get_world_size() - 1:
        # For a node to be lost, and to come. One rank alone takes two micro-batches a step.
        while calls == {"0": 8, "1": 9}.get(os.environ["TORCHELASTIC_RESTART_COUNT"]):
            time.sleep(0.1)
    if fault == "slow":
        time.sleep(0.1)
        if rank == 0 and calls == 3:
            print("three steps", flush=True)
    return nn.functional.mse_loss(model(batch[0]), batch[1])

torch.manual_seed(0)
x = torch.randn(64, 8)
try:
    result = unipar.fit(
        nn.Linear(8, 1), (x, x.sum(1, keepdim=True)), loss=loss, strategy="ddp", device="cpu",
        global_batch_size=16, optimizer={"name": "sgd", "lr": 0.05},
        checkpoint={"every_steps": 3, "async": False}, log_every=1, progress=False, **arguments,
    )
except (unipar.ConfigError, unipar.WorkerError) as error:
    sys.exit(f"{type(error).__name__}: {error}")
print("result", result.world_size, flush=True)
"""


NODE = {"num_cpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False}
FAST, SLOW = (
    {**NODE, "labels": {"kind": kind}, "env_vars": {"KIND": kind}} for kind in ("fast", "slow")
)


@contextlib.contextmanager
def head() -> Iterator[Any]:
    """A cluster of one node with a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        # One machine under several addresses would do as well, but not every machine has those.
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

        started = Cluster(initialize_head=True, head_node_args=FAST)
        try:
            yield started
        finally:
            started.shutdown()


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of two nodes with a CPU each, of which the second is of another kind."""
    with head() as started:
        started.add_node(**SLOW)
        yield started.address


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the same run, by processes of this machine."""
    directory = tmp_path_factory.mktemp("local")
    script = directory / "script.py"
    script.write_text(SCRIPT)
    with start(script, directory / "run", {"devices": 2}) as process:
        assert process.communicate(timeout=100) == ("result 2\n", "")
    return directory / "run"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Run the script; afterwards no process of a rank is left."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def call(name: str, **arguments: Any) -> subprocess.CompletedProcess[str]:
        with start(script, tmp_path / name, arguments) as process:
            out, err = process.communicate(timeout=200)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    yield call
    deadline = time.monotonic() + 10
    while (left := ranks(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def start(script: Path, directory: Path, arguments: dict[str, Any]) -> subprocess.Popen[str]:
    given = json.dumps({"output_dir": str(directory), "steps": 12, **arguments})
    return subprocess.Popen(
        [sys.executable, str(script), given],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},
    )


def ranks(directory: Path) -> list[list[str]]:
    """The command lines of processes that work for runs in a directory."""
    found = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [line for line in found if any(str(directory) in word for word in line[1:])]


def rows(directory: Path) -> list[tuple[Any, Any]]:
    return [(row["step"], row["loss"]) for row in read_metrics(directory / "metrics.jsonl")]


def on(address: str) -> dict[str, Any]:
    return {"launcher": {"name": "ray", "address": address}, "devices": 1, "num_nodes": 2}


def test_two_nodes_train_as_one_machine_and_ray_is_not_heard(
    cluster: str, run: Callable[..., Any], whole: Path, tmp_path: Path
) -> None:
    done = run("ray", **on(cluster))
    assert (done.returncode, done.stdout, done.stderr) == (0, "result 2\n", "")
    assert rows(tmp_path / "ray") == rows(whole)
    places = [json.loads((tmp_path / f"ray-marks/{rank}").read_text())[:2] for rank in range(2)]
    assert places == [["0", "0"], ["1", "0"]]


@pytest.mark.parametrize("kinds", [("fast", "slow"), ("slow", "fast")])
def test_ranks_are_on_nodes_of_their_pools_and_shares_fit_them(
    kinds: tuple[str, str], cluster: str, run: Callable[..., Any], whole: Path, tmp_path: Path
) -> None:
    pools = [{"nodes": 1, "labels": {"kind": kind}} for kind in kinds]
    shares = [3 if kind == "fast" else 1 for kind in kinds]
    asked = on(cluster)
    asked["launcher"]["pools"] = pools
    done = run("ray", **asked, shares=shares)
    assert done.returncode == 0, done.stderr
    losses = [loss for _, loss in rows(tmp_path / "ray")]
    assert losses == pytest.approx([loss for _, loss in rows(whole)], rel=1e-5)
    seen = [json.loads((tmp_path / f"ray-marks/{rank}").read_text()) for rank in range(2)]
    assert [row[-1] for row in seen] == [4 * share for share in shares]
    assert [row[-2] for row in seen] == list(kinds)


def test_pools_that_are_not_there_are_refused(cluster: str, run: Callable[..., Any]) -> None:
    asked = on(cluster)
    asked["launcher"]["pools"] = [{"nodes": 2, "labels": {"kind": "slow"}}]
    done = run("run", **asked)
    assert done.returncode == 1
    assert "asks for 2 node(s) with kind=slow, and of those" in done.stderr
    assert "kind=fast" in done.stderr


def test_error_of_a_rank_on_another_node_is_the_callers(
    cluster: str, run: Callable[..., Any]
) -> None:
    done = run("run", fault="raise", **on(cluster))
    assert done.returncode == 1
    assert done.stderr.startswith("WorkerError: Rank 1 of 2 failed in step 5")
    assert "ValueError: boom on one" in done.stderr
    assert 'raise ValueError("boom on one")' in done.stderr


def test_killed_rank_is_started_again_from_the_newest_checkpoint(
    cluster: str, run: Callable[..., Any], whole: Path, tmp_path: Path
) -> None:
    done = run("run", fault="kill", max_restarts=1, **on(cluster))
    assert done.returncode == 0, done.stderr
    assert "resuming at step 3 from" in done.stdout
    assert done.stdout.endswith("result 2\n")
    assert "rank 1 was killed by SIGKILL. Restarting all ranks (0 restarts left)." in done.stderr
    assert rows(tmp_path / "run") == rows(whole)


@pytest.mark.timeout(900)
def test_a_run_goes_on_without_a_node_that_is_lost_and_with_one_that_comes(
    whole: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    directory = tmp_path / "run"
    with head() as nodes:
        second = nodes.add_node(**NODE)
        launcher = {"name": "ray", "address": nodes.address, "resize_interval": 1.0}
        arguments = {"launcher": launcher, "devices": "1:2", "fault": "waits"}
        with start(script, directory, arguments) as process:
            until(lambda: last_step(directory) >= 7)
            [lost] = ranks_on(second.node_id, directory)
            nodes.remove_node(second, allow_graceful=False)
            until(lambda: last_step(directory) >= 10 and worlds(directory) == [2, 1])
            nodes.add_node(**NODE)
            out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert out.endswith("result 2\n")
    [line] = [one for one in err.splitlines() if "The run goes on with 1 rank, not 2: " in one]
    # Who is gone is said by the node's end, or by the ranks that waited for it.
    assert f"rank {lost}" in line.lower()
    assert "The run goes on with 2 ranks, not 1: the cluster has room for more." in err
    assert worlds(directory) == [2, 1, 2]
    found, expected = rows(directory), rows(whole)
    assert [step for step, _ in found] == [step for step, _ in expected]
    losses = [loss for _, loss in expected]
    assert [loss for _, loss in found] == pytest.approx(losses, rel=1e-5)


def ranks_on(node: str, directory: Path) -> list[int]:
    """The ranks of a run's first start that Ray has put on a node."""
    places = map(json.loads, (one.read_text() for one in directory.glob("launch/*/place-0-*.json")))
    return [rank for id, _, ranks in places for rank in ranks if id == node]


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def last_step(directory: Path) -> int:
    if not (directory / "metrics.jsonl").exists():
        return 0
    return max((step for step, _ in rows(directory)), default=0)


def worlds(directory: Path) -> list[int]:
    """How many ranks there were, one start after the other."""
    lines = map(json.loads, (directory / "events.jsonl").read_text().splitlines())
    return [line["world_size"] for line in lines if line["event"] == "started"]


def test_what_the_cluster_has_no_room_for_is_refused(cluster: str, run: Callable[..., Any]) -> None:
    done = run("run", **{**on(cluster), "devices": 3})
    assert done.returncode == 1
    assert "needs 3 CPU on each of 2 nodes" in done.stderr
    assert "of the 2 nodes of the cluster 0 have that much" in done.stderr
    assert done.stderr.count(f"{socket.gethostname()}: 1 CPU and 0 GPU") == 2
    done = run("range", launcher=on(cluster)["launcher"], devices="3:4")
    assert done.returncode == 1
    assert "devices='3:4' needs 1 CPU for each of 3 ranks at least" in done.stderr
    assert "the 2 nodes of the cluster have room for 2" in done.stderr


def test_a_rank_that_is_killed_on_a_node_that_lives_takes_a_restart(
    cluster: str, run: Callable[..., Any]
) -> None:
    done = run("run", launcher=on(cluster)["launcher"], devices="1:2", fault="kill")
    assert done.returncode == 1
    assert done.stderr.startswith("WorkerError: ")
    assert "ank 1" in done.stderr
    assert "The run goes on" not in done.stderr


def test_a_rank_that_leaves_as_if_all_were_well_is_named(
    cluster: str, run: Callable[..., Any]
) -> None:
    done = run("run", fault="leave", **on(cluster))
    assert done.returncode == 1
    assert done.stderr.startswith("WorkerError: Rank 1 of 2 ended without a word: on ")
    assert ", rank 1 exited with status 0 before its function had returned" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_run_on_this_machine_saves_when_asked_to_end_and_leaves_nothing(
    number: signal.Signals, tmp_path: Path, still_running: Callable[..., Any]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    arguments = {"launcher": "ray", "devices": 2, "steps": 10_000, "fault": "slow"}
    with start(script, tmp_path / "run", {**arguments, "max_restarts": 2}) as process:
        assert process.stdout is not None
        # Live: the run is far from its end.
        assert process.stdout.readline() == "three steps\n"
        family = [one.pid for one in psutil.Process(process.pid).children(recursive=True)]
        assert len(family) > 5
        process.send_signal(number)
        process.communicate(timeout=100)
    assert process.returncode == (-signal.SIGINT if number == signal.SIGINT else 143)
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert not still_running(family)


def test_ray_tune_sweeps_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=220,
        env={**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    trials = [line.split() for line in lines if line.startswith(("ddp", "fsdp"))]
    assert {trial[0] for trial in trials} == {"ddp", "fsdp"}
    # The scheduler has stopped what is behind, and the best one has come to its end.
    assert min(int(trial[2]) for trial in trials) < max(int(trial[2]) for trial in trials) == 300
    assert lines[-1].startswith("best: ")
