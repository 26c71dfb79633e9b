"""Let links, hosts and clocks fail between the ranks of a run, and see how the run ends.

Under each strategy a small run goes on two hosts, or three, which are network namespaces with a
network between them (measure/reliability/network.py); while it trains, something fails. The run has
to name what failed within the timeout, to resume, or to train on with the losses of a run that
nobody disturbed; and no process may be left.

python measure/reliability/faults.py                       all of them, for the docs
python measure/reliability/faults.py --faults cut frozen   only these; others are kept
python measure/reliability/faults.py --strategies ddp      only this strategy; others are kept

It takes root, iproute2, /dev/net/tun and a C compiler; and Open MPI, for one row.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

# Before torch is imported: threads of its own would compete with the other processes.
os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from measure.reliability.network import Hosts, hosts, missing  # noqa: E402
from measure.report import circumstances  # noqa: E402

VICTIM = Path(__file__).with_name("victim.py")
STRATEGIES = ("ddp", "fsdp", "zero3", "horovod")
# Whose forward passes wait for other ranks, which hides which of them computes slowly.
_EXCHANGING = ("fsdp", "zero3")
TIMEOUT = 15.0
_START, _AWAY, _LEFT, _GRACE, _TELL, _LATE = 240.0, 4.0, 10.0, 5.0, 1.5, 5.0
_PORT, _STEPS, _STEP, _SAVE = 29400, 16, 6, 5
_HOUR = 3600
_CLOCK = Path(__file__).with_name("clock.c")


@dataclass(frozen=True)
class Fault:
    """Something that fails.

    Attributes:
        what: it, for the table.
        ends: how the run has to end: ``"named"``, ``"resumed"`` or ``"trained on"``.
        do: makes it fail, while a rank waits in a step.
        says: what each error says, in words that all have to be in it.
        waits: the rank that waits in a step meanwhile.
        lost: the hosts whose processes need not end by themselves.
        places: how the ranks are started, and on how many hosts.
        asked: what the run is asked besides.
        clocks: hosts whose clocks are so many seconds ahead.
    """

    what: str
    ends: str
    do: Callable[[Trial], None] = lambda trial: None
    says: tuple[str, ...] = ()
    waits: int = 0
    lost: tuple[int, ...] = ()
    places: tuple[tuple[str, int], ...] = (("ranks", 2),)
    asked: dict[str, Any] = field(default_factory=dict)
    clocks: dict[int, int] = field(default_factory=dict)


def _cut(trial: Trial) -> None:
    trial.hosts.cut(trial.case.hosts - 1)


def _cut_for_a_moment(trial: Trial) -> None:
    _cut(trial)
    trial.go_on()
    time.sleep(_AWAY)
    trial.hosts.join(trial.case.hosts - 1)


def _forget_directory(trial: Trial) -> None:
    """Mount another file system on the second host in the place of the checkpoints."""
    there = str(trial.here / "run" / "checkpoints")
    pid = str(trial.hosts.processes(1)[0])
    subprocess.run(["nsenter", "-t", pid, "-m", "mount", "-t", "tmpfs", "none", there], check=True)


def _reboot(trial: Trial) -> None:
    trial.hosts.power_off(1)
    trial.go_on()
    time.sleep(_AWAY)
    trial.hosts.join(1)
    trial.start_host(1)


FAULTS = {
    "cut": Fault(
        "a link is cut", "named", _cut, ("Link or host", " {last} (10.77.0."), places=(
            ("ranks", 2), ("ranks", 3), ("fit", 2)),
    ),
    "away": Fault(f"a link is cut for {_AWAY:.0f} s", "trained on", _cut_for_a_moment),
    "delay": Fault("packets take 20 ms", "trained on", lambda trial: trial.hosts.set(delay=0.02)),
    "loss": Fault("1 % of packets are lost", "trained on", lambda t: t.hosts.set(loss=0.01)),
    "frozen": Fault(
        "a host is frozen, its clock an hour ahead", "named", lambda t: t.hosts.freeze(1),
        ("ank 1 was last seen in step", "on b"), lost=(1,), clocks={1: _HOUR},
        places=(("ranks", 2), ("torchrun", 2), ("fit", 2)),
    ),
    "clocks": Fault(
        "clocks are an hour apart, and the run goes on where they are the other way round",
        "resumed", clocks={1: _HOUR},
    ),
    "store": Fault(
        "the host of the store loses power", "named", lambda t: t.hosts.power_off(0),
        ("Link or host", "the run's store at", "look at the network between the hosts, and at a"),
        waits=1, lost=(0,), places=(("ranks", 2), ("ranks", 3)),
    ),
    "directory": Fault(
        "the directory of checkpoints is gone from a host", "named", _forget_directory,
        ("Could not save step", "rank 1 failed", "on a filesystem that all ranks share"),
        places=(("ranks", 2), ("fit", 2)),
    ),
    "killed": Fault(
        "a host loses power", "named", lambda t: t.hosts.power_off(1),
        ("Link or host", "rank 1 on b"), lost=(1,), places=(("ranks", 2), ("fit", 2), ("mpi", 2)),
    ),
    "reboot": Fault(
        "a host loses power, and comes back", "resumed", _reboot, places=(("torchrun", 2),),
    ),
    "loads": Fault(
        "a host loads its data slowly", "trained on", waits=-1,
        asked={"slow": {"1": {"data": 0.2 / 16}}, "steps": 50},
    ),
    "slow": Fault(
        "a host computes slowly", "trained on", waits=-1,
        asked={"slow": {"1": {"loss": 0.3}}, "steps": 50},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One fault in one run."""

    fault: str
    strategy: str
    launcher: str
    hosts: int


class Trial:
    """One run on hosts of its own."""

    def __init__(self, case: Case, here: Path, network: Hosts) -> None:
        self.case, self.here, self.hosts = case, here, network
        self.fault = FAULTS.get(case.fault, Fault("nothing", "trained on"))
        self.clocks = dict(self.fault.clocks)
        self.started: dict[int, subprocess.Popen[bytes]] = {}
        self._log = (here / "log").open("ab")

    def ask(self, **more: Any) -> None:
        hang = {"place": "step", "how": "wait", "rank": self.fault.waits, "step": _STEP}
        asked = {"steps": _STEPS, "every": _SAVE, "pace": 0.1, "async": False, "hang": hang}
        fit: dict[str, Any] = {"devices": self.case.hosts}
        names = list(self.hosts.names)
        if self.case.launcher == "fit":
            launcher = {"name": "torchrun", "hosts": names, "ssh": str(self.hosts.agent)}
            fit = {"devices": 1, "num_nodes": self.case.hosts, "launcher": launcher}
        elif self.case.launcher == "mpi":
            agent = ("--mca", "plm_rsh_agent", str(self.hosts.agent))
            launcher = {"name": "mpi", "hosts": names, "arguments": agent}
            fit = {"devices": 1, "num_nodes": self.case.hosts, "launcher": launcher}
        fit["grace_period"] = _GRACE
        question = {"strategy": self.case.strategy, "timeout": TIMEOUT, "fit": fit, **asked}
        question |= self.fault.asked | more
        (self.here / "question.json").write_text(json.dumps(question))

    def start(self) -> None:
        if self.case.launcher == "fit":
            # As from a machine that is none of the hosts.
            self._run(-1, [sys.executable, *self._script])
        elif self.case.launcher == "mpi":
            self.start_host(0)
        else:
            for host in range(self.case.hosts):
                self.start_host(host)

    def start_host(self, host: int) -> None:
        count, variables = str(self.case.hosts), {}
        command = [sys.executable, *self._script]
        if self.case.launcher == "ranks":
            variables = {"MASTER_ADDR": "a", "MASTER_PORT": str(_PORT), "WORLD_SIZE": count}
            variables |= {"RANK": str(host), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        elif self.case.launcher == "torchrun":
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", count]
            restarts = int(self.fault.ends == "resumed")
            command += ["--nproc-per-node=1", "--rdzv-backend=c10d", f"--max-restarts={restarts}"]
            command += [f"--rdzv-endpoint=a:{_PORT}", *self._script]
            # Else an agent that was started again waits for the address of a store that the others
            # keep to themselves (torch 2.13, elastic/rendezvous/dynamic_rendezvous.py).
            variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        if ahead := self.clocks.get(host):
            variables |= {"LD_PRELOAD": str(self._clock()), "AHEAD": str(ahead)}
        self._run(host, self.hosts.inside(host, *command), **variables)

    @property
    def _script(self) -> list[str]:
        return [str(VICTIM), str(self.here / "question.json")]

    def _run(self, host: int, command: list[str], **variables: str) -> None:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        self.started[host] = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )

    def _clock(self) -> Path:
        library = self.here / "clock.so"
        if not library.exists():
            command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(_CLOCK), "-ldl"]
            subprocess.run(command, check=True)
        return library

    def began(self) -> float:
        """When the rank came to where it waits.

        Raises:
            RuntimeError: it did not.
        """
        deadline, file = time.monotonic() + _START, self.here / "began.json"
        while not file.exists():
            ended = any(one.poll() is not None for one in self.started.values())
            if time.monotonic() > deadline or ended:
                raise RuntimeError(f"it did not come to its step:\n{self.log()[-3000:]}")
            time.sleep(0.02)
        # Ranks say where they are once a second, and these steps are short.
        time.sleep(_TELL)
        return time.time()

    def go_on(self) -> None:
        """Let the rank that waits in a step go on."""
        (self.here / "done").touch()

    def end(self) -> int:
        """Wait for all that has to end by itself; how many processes have not."""
        own = [one for host, one in self.started.items() if host not in self.fault.lost]
        processes = [psutil.Process(one.pid) for one in own if one.poll() is None]
        return len(psutil.wait_procs(processes, timeout=8 * TIMEOUT)[1])

    def left(self) -> int:
        """How many processes are left on the hosts that should have none."""
        alive = [host for host in range(self.case.hosts) if host not in self.fault.lost]
        deadline = time.monotonic() + _LEFT
        while left := sum(len(self.hosts.processes(host)) for host in alive):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return left

    def log(self) -> str:
        return (self.here / "log").read_text(errors="replace")

    def losses(self) -> dict[int, float]:
        """Each step's, as it was computed last."""
        diary = self.here / "diary.jsonl"
        entries = map(json.loads, diary.read_text().splitlines()) if diary.exists() else ()
        return {entry["step"]: entry["loss"] for entry in entries if "step" in entry}

    def events(self) -> list[dict[str, Any]]:
        file = self.here / "run" / "events.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()]

    def errors(self) -> list[dict[str, Any]]:
        return [json.loads(file.read_text()) for file in sorted(self.here.glob("error-*.json"))]

    def close(self) -> None:
        self._log.close()
        for one in self.started.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in psutil.Process(one.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            one.kill()
            one.wait()


@contextlib.contextmanager
def trial(case: Case) -> Iterator[Trial]:
    with tempfile.TemporaryDirectory(prefix="unipar-fault-") as name:
        here = Path(name)
        with hosts(here, case.hosts) as network:
            found = Trial(case, here, network)
            try:
                yield found
            finally:
                found.close()


def undisturbed(strategy: str) -> dict[int, float]:
    """The losses of a run on two hosts, long enough for all."""
    with trial(Case("", strategy, "ranks", 2)) as run:
        run.ask(steps=50, pace=0.0, hang={"place": "", "how": "", "rank": -1, "step": 0})
        run.start()
        if run.end() or len(run.losses()) < 50:
            raise RuntimeError(run.log()[-3000:])
        return run.losses()


def measure(case: Case, wanted: dict[int, float]) -> dict[str, Any]:
    """How the run ended, and after how long."""
    with trial(case) as run:
        fault = run.fault
        if case.fault == "clocks":
            run.ask(steps=_STEP + 2, hang={"place": "", "how": "", "rank": -1, "step": 0})
            run.start()
            run.end()
            run.clocks = {0: _HOUR}
            run.ask(hang={"place": "", "how": "", "rank": -1, "step": 0})
        else:
            run.ask()
        run.start()
        began = time.time()
        if case.fault not in ("clocks", "loads", "slow"):
            began = run.began()
            fault.do(run)
            run.go_on()
        late = run.end()
        seconds = time.time() - began
        left = run.left()
        errors = run.errors()
        if fault.ends == "named":
            last = run.hosts.names[-1]
            right, why = _named(fault, errors, last, run.case)
        else:
            right, why = _trained(run, wanted)
        problem = "" if right and not late and not left else why or "processes did not end"
        if problem:
            problem += "\n" + run.log()[-2500:]
    said = [error["message"].splitlines()[0] for error in errors]
    told = {"what": fault.what, "ends": fault.ends, "order": _order(asdict(case))}
    found = {**asdict(case), **told, "right": not problem, "left": left + late, "said": said}
    return {**found, "seconds": round(seconds, 1), "problem": problem}


def _named(fault: Fault, errors: list[dict[str, Any]], last: str, case: Case) -> tuple[bool, str]:
    survivors = 1 if case.launcher in ("fit", "mpi") else case.hosts - len(fault.lost)
    if len(errors) != survivors:
        return False, f"{len(errors)} of {survivors} have ended with an error that says why"
    for error in errors:
        for words in fault.says:
            if words.format(last=last) not in error["message"]:
                return False, f"{words.format(last=last)!r} is not in: {error['message']}"
        for ago in re.findall(r"(\d+) s(?: ago| from)", error["message"]):
            # Of clocks that are apart nothing is to be seen in it.
            if not TIMEOUT - _LATE < int(ago) < 4 * TIMEOUT:
                return False, f"it was not {ago} s ago: {error['message']}"
    return True, ""


def _trained(run: Trial, wanted: dict[int, float]) -> tuple[bool, str]:
    found, steps = run.losses(), run.fault.asked.get("steps", _STEPS)
    if len(found) != steps:
        return False, f"it ended after {len(found)} of {steps} steps"
    apart = max(abs(found[step] - wanted[step]) for step in found)
    if apart:
        return False, f"losses are {apart} apart"
    started = [event for event in run.events() if event["event"] == "started"]
    if (len(started) > 1) != (run.fault.ends == "resumed"):
        return False, f"it was started {len(started)} times"
    if run.fault.ends == "resumed" and not started[-1]["step"]:
        return False, "it began again from its first step"
    if "slow" in run.fault.asked:
        slow = [(e["rank"], e["host"]) for e in run.events() if e["event"] == "slow"]
        return slow == [(1, "b")], f"named as slow: {slow}"
    return True, ""


def cases(strategy: str) -> Iterator[Case]:
    for name, fault in FAULTS.items():
        if name == "slow" and strategy in _EXCHANGING:
            continue
        for launcher, count in fault.places:
            if launcher != "mpi" or (strategy == "ddp" and shutil.which("mpirun")):
                yield Case(name, strategy, launcher, count)


def _order(one: dict[str, Any]) -> tuple[Any, ...]:
    fault, strategy = list(FAULTS).index(one["fault"]), STRATEGIES.index(one["strategy"])
    places = FAULTS[one["fault"]].places
    return fault, places.index((one["launcher"], one["hosts"])), strategy


def add(path: Path, part: dict[str, Any]) -> None:
    """Put ``part`` in the place of the same cases as they were measured before."""
    parts = json.loads(path.read_text())["parts"] if path.exists() else []

    def case(one: dict[str, Any]) -> Case:
        return Case(**{name: one[name] for name in Case.__dataclass_fields__})

    part["faults"].sort(key=lambda one: one["order"])
    measured = {case(one) for one in part["faults"]}
    for old in parts:
        old["faults"] = [one for one in old["faults"] if case(one) not in measured]
    parts = [*(old for old in parts if old["faults"]), part]
    path.write_text(json.dumps({"parts": parts}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=tuple(FAULTS))
    parser.add_argument("--lanes", type=int, default=4, help="runs at the same time")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "reliability" / "faults.json")
    arguments = parser.parse_args()
    if lacking := missing():
        sys.exit(f"It {lacking}.")
    chosen = [
        case
        for name in arguments.strategies
        for case in cases(name)
        if case.fault in arguments.faults
    ]
    began, found = time.perf_counter(), list[dict[str, Any]]()
    command = "python " + " ".join(("measure/reliability/faults.py", *sys.argv[1:]))
    arguments.out.parent.mkdir(exist_ok=True)
    writing = threading.Lock()
    with ThreadPoolExecutor(arguments.lanes) as lanes:
        calm = {name: lanes.submit(undisturbed, name) for name in arguments.strategies}

        def one(case: Case) -> None:
            measured = measure(case, calm[case.strategy].result())
            end = FAULTS[case.fault].ends
            how = end if measured["right"] else f"NOT {end}: {measured['problem']}"
            print(f"{case}: {how}, {measured['seconds']} s\n  {measured['said']}", flush=True)
            with writing:
                # At once, so that what has been measured stays where the survey is itself ended.
                found.append(measured)
                spent = time.perf_counter() - began
                about = circumstances(command, spent, ("deepspeed", "horovod"))
                add(arguments.out, {"about": about, "timeout": TIMEOUT, "faults": list(found)})

        ends = [lanes.submit(one, case) for case in chosen]
    for end in ends:
        # One that did not come to fail at all is no measurement.
        end.result()
    right = sum(one["right"] for one in found)
    print(f"{right} of {len(found)} ended as they have to.")


if __name__ == "__main__":
    main()
