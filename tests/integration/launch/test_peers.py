"""Who is to blame, as ranks say it that another launcher started."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(150)

LAUNCHED = re.compile(r"^(SLURM|OMPI|PMI|PMIX|MPI|TORCHELASTIC|HOROVOD)_|^MASTER_")
SCRIPT = """
import os, signal, subprocess, sys, time
import torch, unipar
import torch.distributed as dist

whose, what, strategy = sys.argv[1:4]
steps = 0

def act():
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "sleep":
        time.sleep(100)
    elif what == "raise":
        raise ValueError("bad batch")
    elif what == "cut":
        subprocess.run(sys.argv[4:], check=True)

def loss(model, batch):
    global steps
    steps += 1
    # Longer than it takes until the others are told again.
    time.sleep(0.7)
    if steps == 3 and session.world.rank == int(whose):
        act()
    return model(batch[0]).square().mean()

session = unipar.Session(strategy=strategy, timeout=5)
with session:
    engine = session.prepare(torch.nn.Linear(4, 4), optimizer=lambda named: torch.optim.SGD(
        [parameter for _, parameter in named], lr=0.1))
    for batch in session.loader(torch.randn(24, 4), global_batch_size=4):
        engine.train_step(batch, loss)
    if what in ("barrier", "late") and session.world.rank == int(whose):
        # Later than the other rank keeps the store for this one.
        time.sleep(6 if what == "late" else 0)
        dist.barrier()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(
    script: Path, arguments: Sequence[str], before: Sequence[Sequence[str]] = ((), ()), **own: str
) -> list[subprocess.Popen[str]]:
    """Both ranks, with the variables that torchrun sets, or another launcher like it."""
    base = {name: value for name, value in os.environ.items() if not LAUNCHED.match(name)}
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo", **own}
    # What DDP imports makes a directory for compiled code.
    place["TORCHINDUCTOR_CACHE_DIR"] = str(script.parent / "compiled")
    command = [sys.executable, str(script), *arguments]
    return [
        subprocess.Popen(
            [*before[rank], *command],
            env={**base, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]


def said(rank: subprocess.Popen[str]) -> str:
    """The message of the rank's error."""
    text = rank.communicate(timeout=100)[1]
    return text.rsplit("unipar.errors.WorkerError: ", 1)[-1]


@pytest.fixture
def ended() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that are killed when the test is over."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


AGAIN = pytest.mark.thorough


@pytest.mark.parametrize(
    ("what", "whose", "strategy", "expected"),
    [
        pytest.param(
            *("stop", 1, "ddp"),
            r"A rank did not answer within timeout=5 s; rank 1 was last seen in step "
            r"[23] \([a-z ]+\), \d+ s ago, on .*; its process does not answer",
        ),
        pytest.param(
            *("sleep", 1, "fsdp"),
            r"A rank did not answer within timeout=5 s; rank 1 was last seen in step "
            r"3 \(forward\), \d+ s ago, on .*; its process answers",
            marks=AGAIN,
        ),
        pytest.param(
            *("stop", 0, "ddp"),
            r"Rank 0 did not answer within timeout=5 s, and the run's store at .*, which "
            "it keeps, does not answer: its process on 127.0.0.1 was stopped",
            marks=AGAIN,
        ),
        pytest.param(
            *("raise", 1, "ddp"),
            r"Rank 1 failed in step 3 \(forward\): ValueError: bad batch",
            marks=AGAIN,
        ),
        pytest.param(
            *("raise", 0, "ddp"),
            r"Rank 0 failed in step 3 \(forward\): ValueError: bad batch",
            marks=AGAIN,
        ),
        pytest.param(
            *("barrier", 1, "ddp"),
            r"Rank 1 was in step 6 \(optimizer step\) in a collective that rank 0 did not take "
            "part in, having already returned",
            marks=AGAIN,
        ),
        pytest.param(
            *("late", 1, "ddp"),
            r"Rank 1 was in step 6 \(optimizer step\) in a collective that rank 0 did not take "
            "part in, having already returned",
            marks=AGAIN,
        ),
    ],
)
def test_the_rank_that_is_left_says_who_is_to_blame(
    script: Path,
    ended: list[subprocess.Popen[str]],
    what: str,
    whose: int,
    strategy: str,
    expected: str,
) -> None:
    ended += start(script, [str(whose), what, strategy])
    # With the barrier too many, the one that makes it is left.
    left = ended[whose if what in ("barrier", "late") else 1 - whose]
    assert re.match(expected, said(left))


@pytest.mark.thorough
def test_under_torchrun_too(script: Path, ended: list[subprocess.Popen[str]]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["--log-dir", str(script.parent / "logs")]
    run = subprocess.Popen(
        [*command, str(script), "0", "stop", "ddp"],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(script.parent / "compiled")},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    ended.append(run)
    # Torchrun gives the stopped process half a minute to end.
    error = run.communicate(timeout=120)[1]
    # Torchrun keeps the store, so that of rank 0 too it is known where it was.
    assert re.search(r"A rank did not answer .*; rank 0 was last seen in step [23] \(", error)


@pytest.fixture
def hosts() -> Iterator[tuple[dict[str, str], list[str]]]:
    """Two network namespaces by address, and the command that cuts the link between them."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces take root, and the command ip (Debian's iproute2)")
    names = [f"unipar-{uuid.uuid4().hex[:8]}" for _ in range(2)]
    found: dict[str, str] = dict(zip(("10.77.1.1", "10.77.1.2"), names, strict=True))

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ends = ["type", "veth", "peer", "name", "eth0", "netns", names[1]]
        ip("link", "add", "name", "eth0", "netns", names[0], *ends)
        for address, name in found.items():
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth0", "up")
        yield found, ["ip", "-n", names[0], "link", "set", "eth0", "down"]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False)


@pytest.mark.root
@pytest.mark.thorough
def test_a_link_that_is_cut_is_nobodys_fault(
    script: Path, ended: list[subprocess.Popen[str]], hosts
) -> None:
    found, cut = hosts
    own = {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.77.1.1", "GLOO_SOCKET_IFNAME": "eth0"}
    before = [["ip", "netns", "exec", name, "env", "LOCAL_RANK=0"] for name in found.values()]
    ended += start(script, ["0", "cut", "ddp", *cut], before, **own)
    near, far = (said(rank) for rank in ended)
    assert re.match(
        r"Link or host: nothing has come for \d+ s from rank 1 on .* "
        r"\(10.77.1.2\), and that host cannot be reached from .* \(10.77.1.1\). No rank is to",
        near,
    )
    assert re.match(
        r"Link or host: the run's store at 10.77.1.1:\d+ cannot be "
        r"reached from .* \(10.77.1.2\). No rank is to blame",
        far,
    )
