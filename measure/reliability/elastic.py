"""Seconds that a run loses when its number of ranks changes, and that its losses stay as they are.

A run of 4 ranks is asked to go on with 2, then with 4, and then a rank is killed. Each group of
ranks is of new interpreters, as for a user.

python measure/reliability/elastic.py                              five strategies, three times each
python measure/reliability/elastic.py --strategies ddp --repeats 1

What is found goes to docs/reliability/elastic.json, beside what is there of other strategies.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Before torch is imported: threads of its own would compete with the other processes.
os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402

import unipar  # noqa: E402
from measure.report import circumstances  # noqa: E402
from unipar.launch.elastic import ask  # noqa: E402

STRATEGIES = ("ddp", "fsdp", "zero3", "horovod", "mesh:tp=2")
STEPS, EVERY = 20, 4
ASKED = {5: 2, 10: 4}
KILLED = 15
WIDTH, BLOCKS = 512, 4


class Changes(unipar.Callback):
    """Asks for other numbers of ranks, and kills the last rank of the third group, once."""

    every_rank = True

    def on_step_end(self, run: Any, record: Any) -> None:
        if record.step in ASKED and run.rank == 0:
            ask(run.output_dir, ASKED[record.step])
        if record.step == KILLED and run.restart == 2 and run.rank == run.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def model() -> nn.Module:
    blocks = [Block() for _ in range(BLOCKS)]
    return nn.Sequential(nn.Linear(32, WIDTH), nn.Sequential(*blocks), nn.Linear(WIDTH, 4))


def run(strategy: str, devices: str | int, here: Path) -> list[float]:
    """The losses of a run; one with a range of devices is disturbed."""
    torch.manual_seed(0)
    data = torch.randn(512, 32), torch.randint(0, 4, (512,))
    result = unipar.fit(
        model,
        data,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer={"name": "adamw", "lr": 1e-4},
        strategy=strategy,
        device="cpu",
        devices=devices,
        global_batch_size=32,
        steps=STEPS,
        output_dir=here,
        checkpoint={"every_steps": EVERY, "save_final": False},
        callbacks=[Changes()] if isinstance(devices, str) else [],
        log_level="warning",
        progress=False,
    )
    return result.losses


def measure(strategy: str) -> dict[str, Any]:
    """One disturbed run of a strategy, beside one on a single device."""
    with tempfile.TemporaryDirectory(prefix="unipar-elastic-") as name:
        here = Path(name)
        losses = run(strategy, "2:4", here / "run")
        wanted = run("single", 1, here / "single")
        lines = (here / "run" / "events.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["event"] == "changed"]
    names = ("before", "after", "why", "seconds", "repeated")
    changes = [{name: row[name] for name in names} for row in rows]
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))
    print(strategy, [change["seconds"] for change in changes], f"{apart:.1e} apart", flush=True)
    return {"strategy": strategy, "changes": changes, "apart": apart}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--strategies", type=lambda text: text.split(","), default=STRATEGIES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "reliability" / "elastic.json")
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(exist_ok=True)
    asked = ""
    if arguments.strategies != STRATEGIES:
        asked += f" --strategies {','.join(arguments.strategies)}"
    if arguments.repeats != 3:
        asked += f" --repeats {arguments.repeats}"
    began, found = time.perf_counter(), []
    for strategy in arguments.strategies:
        found += [measure(strategy) for _ in range(arguments.repeats)]
        # After each strategy, so that what has been measured stays where this is itself ended.
        command = f"python measure/reliability/elastic.py{asked}"
        about = circumstances(command, time.perf_counter() - began, ("deepspeed", "horovod"))
        write(arguments.out, {"about": about, "runs": found})


def write(path: Path, part: dict[str, Any]) -> None:
    """Put ``part`` in the place of what there is of its strategies."""
    parts = json.loads(path.read_text())["parts"] if path.exists() else []
    own = {run["strategy"] for run in part["runs"]}
    for other in parts:
        other["runs"] = [run for run in other["runs"] if run["strategy"] not in own]
    parts = [*(other for other in parts if other["runs"]), part]
    path.write_text(json.dumps({"parts": parts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
