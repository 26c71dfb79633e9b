"""Seconds that a replica's loss and return cost, and the price of a step, beside other systems.

The same job of two ranks (measure/reliability/replicas.py) under unipar's ``devices="1:2"``,
torchelastic (``torchrun --nnodes=1:2``), Ray Train (``num_workers=(1, 2)``) and torchft. One rank,
or the node that it stands on, is killed; later one comes back. A change costs what the run is
longer without a new step than between two steps, steps that are repeated included; what is shorter
than three steps counts as none.

python measure/reliability/beside.py                     all, three times each, in turn
python measure/reliability/beside.py --kinds torchft     one of them; --repeats 1: once
python measure/reliability/beside.py --only prices       not what changes cost

Beside unipar it needs: pip install "unipar[ray]" torchft==0.2.0 (`--no-deps` where its torch would
take the place of yours; then opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http, too).
What is found goes to docs/reliability/beside.json, beside what is there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import psutil

# Before torch is imported: threads of its own would compete with the other processes.
os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from measure.ports import free_port  # noqa: E402
from measure.reliability import replicas  # noqa: E402
from measure.report import circumstances  # noqa: E402
from unipar.launch.elastic import ask  # noqa: E402

SCRIPT = ROOT / "measure" / "reliability" / "replicas.py"
EVERY, PACE, PRICED = 4, 0.2, 150
BEFORE, AFTER = 10, 8
_PATIENCE = 600.0
_ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    "GLOO_SOCKET_IFNAME": "lo",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    # Without it no agent can join that of another round.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


class Job:
    """The job under one system, in a directory of its own; a context manager."""

    kind: ClassVar[str]
    name: ClassVar[str]
    question: ClassVar[dict[str, Any]] = {}

    def __init__(self, here: Path, **question: Any) -> None:
        self.here, self.log = here, (here / "log").open("w")
        asked = {"steps": 100_000, "every": EVERY, "pace": PACE, "losses": True}
        self.asked = {"kind": self.kind, **asked, **self.question, **question}
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start it on two ranks."""
        self.spawn([sys.executable, str(SCRIPT), str(self.here)])

    def lose(self) -> None:
        """Kill one."""
        raise NotImplementedError

    def gain(self) -> None:
        """Let another come."""
        raise NotImplementedError

    def spawn(self, command: list[str], **variables: str) -> subprocess.Popen[bytes]:
        name = variables.setdefault("QUESTION", "question.json")
        (self.here / name).write_text(json.dumps(self.asked))
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **_ENVIRONMENT, **variables},
        )
        self._processes.append(process)
        return process

    def rows(self) -> list[dict[str, Any]]:
        diary = self.here / "diary.jsonl"
        text = diary.read_text() if diary.exists() else ""
        # The last line may be half written.
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def wait(self) -> None:
        """Until it has come to its end."""
        for process in self._processes:
            if process.wait(_PATIENCE):
                raise RuntimeError(f"{self.kind}:\n{(self.here / 'log').read_text()[-3000:]}")

    def __enter__(self) -> Job:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            kill(process)


class Unipar(Job):
    kind, name = "unipar", 'unipar, `devices="1:2"`'
    question: ClassVar[dict[str, Any]] = {"devices": "1:2"}

    def lose(self) -> None:
        os.kill(int((self.here / "pid-1").read_text()), signal.SIGKILL)

    def gain(self) -> None:
        ask(self.here / "run", 2)


class Torchelastic(Job):
    kind, name = "torchrun", "torchelastic, `--nnodes=1:2`"
    conf = ""

    def start(self) -> None:
        port = free_port()
        self._command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--max-restarts=9"),
            *([f"--rdzv-conf={self.conf}"] if self.conf else []),
            *(str(SCRIPT), str(self.here)),
        ]
        self.spawn(self._command)
        # The first one has the store.
        time.sleep(3.0)
        self._second = self.spawn(self._command)

    def lose(self) -> None:
        kill(self._second)

    def gain(self) -> None:
        self._second = self.spawn(self._command)


class TorchelasticTuned(Torchelastic):
    name = "torchelastic, `--rdzv-conf=last_call_timeout=1,keep_alive_interval=1`"
    conf = "last_call_timeout=1,keep_alive_interval=1"


class Ray(Job):
    kind, name = "ray", "Ray Train, `num_workers=(1, 2)`"
    question: ClassVar[dict[str, Any]] = {"ray_looks_every": 2.0}

    def lose(self) -> None:
        (self.here / "lose").touch()

    def gain(self) -> None:
        (self.here / "gain").touch()


class Torchft(Job):
    kind, name = "torchft", "torchft, two replicas"
    question: ClassVar[dict[str, Any]] = {"asynchronous": False}
    heartbeat: tuple[str, ...] = ()

    def start(self) -> None:
        self._port = free_port()
        lighthouse = Path(sysconfig.get_path("scripts"), "torchft_lighthouse")
        # As its README has it.
        times = ("--quorum_tick_ms", "100", "--join_timeout_ms", "10000", *self.heartbeat)
        bind = ("--bind", f"[::]:{self._port}")
        self._lighthouse = self.spawn([str(lighthouse), "--min_replicas", "1", *times, *bind])
        self._replica("0")
        self._second = self._replica("1")

    def _replica(self, name: str) -> subprocess.Popen[bytes]:
        self.asked["replica"] = name
        command = [sys.executable, str(SCRIPT), str(self.here)]
        variables = {"TORCHFT_LIGHTHOUSE": f"http://localhost:{self._port}"}
        return self.spawn(command, QUESTION=f"question-{name}.json", **variables)

    def lose(self) -> None:
        kill(self._second)

    def gain(self) -> None:
        self._second = self._replica("1")

    def wait(self) -> None:
        for process in self._processes:
            if process is not self._lighthouse:
                process.wait(_PATIENCE)


class TorchftTuned(Torchft):
    name = "torchft, `--heartbeat_timeout_ms 1000`"
    heartbeat = ("--heartbeat_timeout_ms", "1000")


class TorchftAsynchronous(Torchft):
    """Its default: the quorum overlaps with the forward pass, and ranks know no shares by it."""

    name = "torchft, its quorum behind the forward pass"
    question: ClassVar[dict[str, Any]] = {"asynchronous": True}


class Plain(Torchelastic):
    name = "PyTorch's DDP"

    def start(self) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        self.spawn([*command, "--nproc-per-node=2", str(SCRIPT), str(self.here)])


class UniparFixed(Unipar):
    name = "unipar, `devices=2`"
    question: ClassVar[dict[str, Any]] = {"devices": 2}


CHANGED = (Unipar, Torchelastic, TorchelasticTuned, Ray, Torchft, TorchftTuned)
KINDS = frozenset(job_type.kind for job_type in CHANGED)
PRICES = (Plain, UniparFixed, Unipar, Torchft, TorchftAsynchronous)


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and all below it, at once."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for one in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def progress(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of steps that were not taken before."""
    found: list[dict[str, Any]] = []
    for row in rows:
        if not found or row["step"] > found[-1]["step"]:
            found.append(row)
    return found


def measure(job_type: type[Job]) -> dict[str, Any]:
    """What a loss and a return cost, once."""
    with tempfile.TemporaryDirectory(prefix="unipar-beside-") as name, job_type(Path(name)) as job:
        _until(job, 0.0, 2, BEFORE)
        lost = time.time()
        job.lose()
        _until(job, lost, 1, AFTER)
        gained = time.time()
        job.gain()
        _until(job, gained, 2, AFTER)
        rows = job.rows()
    pace = median(_gaps([row for row in progress(rows) if row["time"] < lost]))
    apart = max(_apart(progress(rows)))
    found = {
        "name": job_type.name,
        "lost": _cost(rows, lost, gained, pace),
        "gained": _cost(rows, gained, rows[-1]["time"], pace),
        "apart": apart,
    }
    print(json.dumps(found), flush=True)
    return found


def _until(job: Job, since: float, ranks: int, count: int) -> None:
    """Wait until so many new steps on so many ranks have ended."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        rows = progress(job.rows())
        if sum(row["ranks"] == ranks for row in rows if row["time"] > since) >= count:
            return
        if time.monotonic() > deadline:
            log = (job.here / "log").read_text()[-3000:]
            raise RuntimeError(f"{job.name}: not {count} steps on {ranks} ranks:\n{log}")
        time.sleep(0.1)


def _gaps(rows: list[dict[str, Any]]) -> Iterator[float]:
    for one, other in pairwise(rows):
        yield other["time"] - one["time"]


def _cost(rows: list[dict[str, Any]], since: float, until: float, pace: float) -> dict[str, Any]:
    """Seconds without a new step over those between steps, and the steps taken once more."""
    new = progress(rows)
    within = [row for row in new if row["time"] <= until]
    begins = max(i for i, row in enumerate(within) if row["time"] <= since)
    stalls = [gap - pace for gap in _gaps(within[begins:]) if gap > 3 * pace]
    again = sum(since < row["time"] <= until for row in rows)
    again -= sum(since < row["time"] <= until for row in new)
    return {"seconds": sum(stalls), "repeated": again}


def _apart(rows: list[dict[str, Any]]) -> Iterator[float]:
    """How far losses are from those of one process, relative."""
    model, x, y = replicas.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=replicas.LR)
    for step, row in enumerate(rows):
        assert row["step"] == step + 1
        first = step * replicas.BATCH % replicas.SAMPLES
        part = slice(first, first + replicas.BATCH)
        loss = torch.nn.functional.cross_entropy(model(x[part]), y[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield abs(row["loss"] - loss.item()) / loss.item()


def price(job_type: type[Job]) -> dict[str, Any]:
    """Seconds from step to step where nothing happens and no checkpoint is written."""
    settings = {"steps": PRICED, "pace": 0.0, "every": 0, "losses": False}
    with (
        tempfile.TemporaryDirectory(prefix="unipar-beside-") as name,
        job_type(Path(name), **settings) as job,
    ):
        job.wait()
        rows = job.rows()[PRICED // 3 :]
    taken = (rows[-1]["cpu"] - rows[0]["cpu"]) / (len(rows) - 1)
    found = {"name": job_type.name, "seconds": median(_gaps(rows)), "cpu": taken}
    print(json.dumps(found), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=("changes", "prices"))
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "reliability" / "beside.json")
    arguments = parser.parse_args()
    kinds = arguments.kinds
    asked = f" --kinds {','.join(kinds)}" if kinds else ""
    asked += f" --repeats {arguments.repeats}" if arguments.repeats != 3 else ""
    asked += f" --only {arguments.only}" if arguments.only else ""
    out = arguments.out
    before = json.loads(out.read_text())["parts"] if out.exists() else []
    began = time.perf_counter()
    found: dict[str, list[dict[str, Any]]] = {"changes": [], "prices": []}
    # In turn, so that what else the machine does meets all of them.
    for _ in range(arguments.repeats):
        for part, measured, job_types in (
            ("changes", measure, CHANGED),
            ("prices", price, PRICES),
        ):
            for job_type in job_types:
                if part != (arguments.only or part) or job_type.kind not in (kinds or KINDS):
                    continue
                found[part].append(measured(job_type))
                # After each, so that what has been measured stays where this is itself ended.
                command = f"python measure/reliability/beside.py{asked}"
                about = circumstances(command, time.perf_counter() - began, ("torchft", "ray"))
                parts = [*before, {"about": about, **found}]
                out.write_text(json.dumps({"parts": parts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
