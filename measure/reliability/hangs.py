"""Let ranks hang, and see whether the right one is named, and how soon the run ends.

Under each strategy a rank is stopped or sleeps in a step, in backward and at a checkpoint, where
this library started the ranks and where torchrun did; and the link between two hosts, which are
network namespaces, is cut (else, without root and iproute2, these are left out).

python measure/reliability/hangs.py                         docs/reliability/hangs.json
python measure/reliability/hangs.py --lanes 4               the same, several at the same time
python measure/reliability/hangs.py --strategies horovod    only this strategy; others are kept

About 40 minutes in one lane.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

# Before torch is imported: threads of its own would compete with the other processes.
os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from measure.reliability.network import hosts, missing  # noqa: E402
from measure.report import circumstances  # noqa: E402

VICTIM = Path(__file__).with_name("victim.py")
STRATEGIES = ("ddp", "fsdp", "zero3", "horovod")
TIMEOUT = 30.0
_START, _PORT = 400.0, 29400


@dataclass(frozen=True)
class Case:
    """One hang.

    Attributes:
        place: where in the run: ``"step"``, ``"backward"`` or ``"checkpoint"``.
        how: ``"stop"`` or ``"sleep"``, as ``measure/reliability/victim.py`` has it; or ``"cut"``.
        launcher: ``"unipar"``, ``"torchrun"``, or ``"namespaces"``: a rank in each of two.
        rank: which one hangs.
        background: whether checkpoints are written in the background.
    """

    strategy: str
    place: str
    how: str
    launcher: str
    rank: int
    background: bool = False


def cases(strategy: str) -> Iterator[Case]:
    yield Case(strategy, "step", "stop", "unipar", 1)
    yield Case(strategy, "step", "sleep", "unipar", 0)
    yield Case(strategy, "step", "stop", "torchrun", 1)
    yield Case(strategy, "backward", "stop", "unipar", 0)
    yield Case(strategy, "backward", "sleep", "unipar", 1)
    yield Case(strategy, "backward", "stop", "torchrun", 0)
    yield Case(strategy, "checkpoint", "stop", "unipar", 1)
    yield Case(strategy, "checkpoint", "stop", "unipar", 0, background=True)
    yield Case(strategy, "step", "cut", "namespaces", 0)
    yield Case(strategy, "backward", "cut", "namespaces", 1)


def measure(case: Case, step: int) -> dict[str, Any]:
    """Whether the error names the right one, and the seconds from the hang to the run's end."""
    with (
        tempfile.TemporaryDirectory(prefix="unipar-hang-") as name,
        contextlib.ExitStack() as stack,
    ):
        here = Path(name)
        how = "wait" if case.how == "cut" else case.how
        hang = {"place": case.place, "how": how, "rank": case.rank, "step": step}
        pace = {"steps": 60, "every": 3, "pace": 0.3, "async": case.background}
        question = {"strategy": case.strategy, "timeout": TIMEOUT, "hang": hang, **pace}
        (here / "question.json").write_text(json.dumps(question))
        started, cut = _start(case, here, stack)
        stack.callback(_end, started)
        began = _began(here, started)
        if cut is not None:
            cut()
            (here / "done").touch()
        survivors = _survivors(case, here, started)
        _, late = psutil.wait_procs(survivors, timeout=6 * TIMEOUT)
        seconds = time.time() - began
        errors = [json.loads(file.read_text()) for file in sorted(here.glob("error-*.json"))]
        # Killed here: the launcher waits half a minute for a stopped process to end by itself.
        _end(started)
    named = bool(errors) and not late and all(_names(case, step, error) for error in errors)
    said = [error["message"].splitlines()[0] for error in errors]
    return {
        **asdict(case),
        "step": step,
        "named": named,
        "seconds": round(seconds, 1),
        "said": said,
    }


def _names(case: Case, step: int, error: dict[str, Any]) -> bool:
    message = error["message"]
    if case.how == "cut":
        both = all(f"{name} (" in message or f"{name}:" in message for name in "ab")
        return error["rank"] is None and "Link or host" in message and both
    # In the background a rank writes while it is in a later step; and ranks that another launcher
    # started say where they are once a second, which is some steps of this small run.
    exact = case.launcher == "unipar" and not case.background
    seen = f"ank {case.rank} was last seen in step " + (f"{step} " if exact else "")
    return error["rank"] == case.rank and seen in message


def _start(
    case: Case, here: Path, stack: contextlib.ExitStack
) -> tuple[list[subprocess.Popen], Any]:
    """The processes that are waited for, by rank where there are several; what cuts the link."""
    script = [str(VICTIM), str(here / "question.json")]
    log = stack.enter_context((here / "log").open("w"))
    base = {**os.environ, "OMP_NUM_THREADS": "1"}

    def start(command: list[str], **variables: str) -> subprocess.Popen:
        return subprocess.Popen(command, env={**base, **variables}, stdout=log, stderr=log)

    if case.launcher == "unipar":
        return [start([sys.executable, *script])], None
    if case.launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [start([*command, "--nproc-per-node=2", *script])], None
    network = stack.enter_context(hosts(here, 2))
    place = {"MASTER_ADDR": network.names[0], "MASTER_PORT": str(_PORT), "WORLD_SIZE": "2"}
    place |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return [
        start(network.inside(rank, sys.executable, *script), RANK=str(rank), **place)
        for rank in range(2)
    ], lambda: network.unplug(0)


def _began(here: Path, started: list[subprocess.Popen]) -> float:
    deadline = time.monotonic() + _START
    file = here / "began.json"
    while not file.exists():
        if time.monotonic() > deadline or all(one.poll() is not None for one in started):
            raise RuntimeError(f"it did not come to hang:\n{(here / 'log').read_text()[-3000:]}")
        time.sleep(0.02)
    return json.loads(file.read_text())


def _survivors(case: Case, here: Path, started: list[subprocess.Popen]) -> list[psutil.Process]:
    """What has to end by itself: under torchrun the other rank."""
    if case.launcher != "torchrun":
        return [psutil.Process(one.pid) for one in started if one.poll() is None]
    ranks = psutil.Process(started[0].pid).children()
    return [one for one in ranks if one.environ().get("RANK") != str(case.rank)]


def _end(started: list[subprocess.Popen]) -> None:
    for one in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(one.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
        one.kill()
        one.wait()


def add(path: Path, part: dict[str, Any]) -> None:
    """Put ``part`` in the place of what was measured before under its strategies."""
    parts = json.loads(path.read_text())["parts"] if path.exists() else []
    measured = {one["strategy"] for one in part["hangs"]}
    for old in parts:
        old["hangs"] = [one for one in old["hangs"] if one["strategy"] not in measured]
    parts = [*(old for old in parts if old["hangs"]), part]
    path.write_text(json.dumps({"parts": parts}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    parser.add_argument("--launchers", nargs="+", default=("unipar", "torchrun", "namespaces"))
    parser.add_argument("--lanes", type=int, default=1, help="hangs at the same time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "reliability" / "hangs.json")
    arguments = parser.parse_args()
    chosen = [case for name in arguments.strategies for case in cases(name)]
    chosen = [case for case in chosen if case.launcher in arguments.launchers]
    if lacking := missing():
        chosen = [case for case in chosen if case.launcher != "namespaces"]
        print(f"Left out: the link between two hosts, which {lacking}.")
    chance = random.Random(arguments.seed)
    # Checkpoints are written after every third step.
    steps = [
        chance.choice((6, 9)) if c.place == "checkpoint" else chance.randint(5, 9) for c in chosen
    ]

    began = time.perf_counter()
    found: list[dict[str, Any]] = []
    arguments.out.parent.mkdir(exist_ok=True)

    def one(case: Case, step: int) -> None:
        measured = measure(case, step)
        right = "named" if measured["named"] else f"NOT NAMED: {measured['said']}"
        print(f"{case}: {right}, {measured['seconds'] / TIMEOUT:.2f} x timeout", flush=True)
        found.append(measured)

    with ThreadPoolExecutor(arguments.lanes) as lanes:
        ends = [lanes.submit(one, *each) for each in zip(chosen, steps, strict=True)]
    found.sort(key=lambda one: chosen.index(Case(**{f: one[f] for f in Case.__dataclass_fields__})))
    spent = time.perf_counter() - began
    command = "python " + " ".join(("measure/reliability/hangs.py", *sys.argv[1:]))
    about = circumstances(command, spent, ("deepspeed", "horovod"))
    add(arguments.out, {"about": about, "timeout": TIMEOUT, "hangs": found})
    for end in ends:
        # One that did not come to hang at all is no measurement, and ends the survey here.
        end.result()
    right = sum(one["named"] for one in found)
    ended = sum(one["seconds"] <= 2 * TIMEOUT for one in found)
    print(f"{right} of {len(found)} named rightly, {ended} ended within twice the timeout.")


if __name__ == "__main__":
    main()
