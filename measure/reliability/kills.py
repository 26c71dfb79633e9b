"""Kill runs at random instants, some of them at checkpoints, and see that nothing is lost.

A run is killed, goes on from its newest checkpoint, and is killed again, some times; then it goes
on to its end, and its losses have to be those of a run that nobody disturbed.

python measure/reliability/kills.py                        200 kills, in half an hour
python measure/reliability/kills.py --number 30 --seed 1   30 others, added to those of other seeds

What is found goes to docs/reliability/kills.json.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import psutil

# Before torch is imported: threads of its own would compete with the other processes.
os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from measure.ports import free_port  # noqa: E402
from measure.reliability import victim  # noqa: E402
from measure.report import circumstances  # noqa: E402
from unipar import checkpoint  # noqa: E402
from unipar.errors import CheckpointError  # noqa: E402

STRATEGIES = ("ddp", "fsdp", "zero2", "zero3", "horovod", "accelerate")
IMPORTED = ("torch._dynamo", "deepspeed", "horovod.torch", "accelerate")
KILLS_OF_A_RUN = 5
_PATIENCE = 240.0


class Run:
    """A run of ``measure/reliability/victim.py`` in a directory, started as often as it takes."""

    def __init__(self, strategy: str, background: bool, here: Path) -> None:
        self.here, self.diary = here, here / "diary.jsonl"
        self.question = here / "question.json"
        pace = {"steps": 60, "every": 3, "pace": 0.1, "timeout": 60.0}
        asked = {"strategy": strategy, "async": background, **pace}
        self.question.write_text(json.dumps(asked))

    def start(self) -> list[psutil.Process]:
        """Its two ranks, forked from this process: what they import takes longer than they run."""
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        place |= {"LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
        return [self._fork({**place, "RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]

    def _fork(self, variables: dict[str, str]) -> psutil.Process:
        pid = os.fork()
        if pid:
            return psutil.Process(pid)
        code = 1
        try:
            os.environ.update(variables)
            with (self.here / "log").open("a") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            code = victim.main(self.question)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def entries(self) -> list[dict[str, Any]]:
        """Of the diary; a line that a kill has cut off is left out."""
        lines = self.diary.read_text().splitlines() if self.diary.exists() else []
        found = []
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
        return found

    def losses(self) -> dict[int, float]:
        """Each step's, as it was computed last."""
        return {entry["step"]: entry["loss"] for entry in self.entries() if "step" in entry}

    def finish(self) -> None:
        """Go on to the end.

        Raises:
            RuntimeError: it does not come to its end.
        """
        codes = [rank.wait(_PATIENCE) for rank in self.start()]
        if any(codes) or not (self.here / "result.json").exists():
            raise RuntimeError(f"status {codes}:\n{(self.here / 'log').read_text()[-3000:]}")


def kill_once(run: Run, chance: random.Random) -> dict[str, Any] | None:
    """Start the run and kill it; what was found then, or ``None`` if it came to its end before."""
    when = chance.choice(("at any time", "in training", "in training", "at a checkpoint"))
    whom = chance.choice(([0], [1], [0, 1]))
    marker, before = run.here / "saving", len(run.entries())
    for old in (marker, *run.here.glob("error-*.json")):
        old.unlink(missing_ok=True)
    ranks = run.start()

    def begun() -> bool:
        if when == "at any time":
            return True
        return marker.exists() if when == "at a checkpoint" else len(run.entries()) > before

    while not begun() and all(_alive(rank) for rank in ranks):
        time.sleep(0.002)
    longest = {"at any time": 4.0, "in training": 2.0, "at a checkpoint": 0.04}[when]
    delay = chance.uniform(0.0, longest)
    time.sleep(delay)
    killed = all(_alive(ranks[rank]) for rank in whom)
    for rank in whom:
        ranks[rank].send_signal(signal.SIGKILL)
    _, left = psutil.wait_procs(ranks, timeout=_PATIENCE)
    for one in left:
        one.kill()
        one.wait()
    found = {"when": when, "killed": whom, "delay": round(delay, 3), "left": len(left)}
    return {**found, **_kept(run)} if killed else None


def _kept(run: Run) -> dict[str, Any]:
    """The newest checkpoint's step, whether it is whole, and whether a newer one was announced."""
    newest = checkpoint.newest(run.here / "run" / "checkpoints")
    step = checkpoint.step_of(newest) if newest else 0
    told = max((entry["checkpoint"] for entry in run.entries() if "checkpoint" in entry), default=0)
    whole = True
    if newest is not None:
        try:
            checkpoint.verify(newest)
        except CheckpointError as error:
            print(f"damaged: {error}", flush=True)
            whole = False
    return {"step": step, "whole": whole, "lost": step < told}


def _alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def live(strategy: str, background: bool, kills: int, seed: int) -> dict[str, Any]:
    """One run with so many kills."""
    chance = random.Random(f"{seed} {strategy} {background}")
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="unipar-kills-") as name:
        run = Run(strategy, background, Path(name))
        while len(found) < kills:
            killed = kill_once(run, chance)
            if killed is None and (run.here / "result.json").exists():
                break
            if killed is not None:
                found.append(killed)
        run.finish()
        losses = run.losses()
    with tempfile.TemporaryDirectory(prefix="unipar-kills-") as name:
        calm = Run(strategy, background, Path(name))
        calm.finish()
        wanted = calm.losses()
    apart = max(abs(losses[step] - wanted[step]) for step in wanted)
    assert losses.keys() == wanted.keys()
    bad = [kill for kill in found if kill["lost"] or not kill["whole"] or kill["left"]]
    print(f"{strategy}: {len(found)} kills, {len(bad)} bad, losses {apart} apart", flush=True)
    return {"strategy": strategy, "async": background, "kills": found, "apart": apart}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--number", type=int, default=200, help="kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "reliability" / "kills.json")
    arguments = parser.parse_args()
    for module in IMPORTED:
        importlib.import_module(module)
    arguments.out.parent.mkdir(exist_ok=True)
    began = time.perf_counter()
    found, left = [], arguments.number
    while left > 0:
        number = len(found)
        strategy, background = STRATEGIES[number % 6], number // 6 % 2 == 1
        kills, seed = min(left, KILLS_OF_A_RUN), arguments.seed * 1000 + number
        found.append(live(strategy, background, kills, seed))
        left -= KILLS_OF_A_RUN
        # After each run, so that what has been measured stays where this one is itself ended.
        asked = f"--number {arguments.number} --seed {arguments.seed}"
        command = f"python measure/reliability/kills.py {asked}"
        spent = time.perf_counter() - began
        about = circumstances(command, spent, ("deepspeed", "horovod", "accelerate"))
        add(arguments.out, {"about": about, "seed": arguments.seed, "runs": found})


def add(path: Path, part: dict[str, Any]) -> None:
    """Put ``part`` among those of other seeds."""
    parts = json.loads(path.read_text())["parts"] if path.exists() else []
    others = [other for other in parts if other["seed"] != part["seed"]]
    parts = sorted([*others, part], key=lambda one: one["seed"])
    path.write_text(json.dumps({"parts": parts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
