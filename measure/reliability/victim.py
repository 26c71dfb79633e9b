"""A small run that hangs as it is asked to, or is killed from outside: python victim.py QUESTION.

QUESTION is a file with JSON, beside which the run leaves what happened: when it hung, each step's
loss, each checkpoint, and the error that it ended with.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import unipar
import unipar.checkpoint.save
from unipar.errors import UniparError


class Hang:
    """Something that one rank does in one step, once.

    Args:
        place: ``"step"``, ``"backward"`` or ``"checkpoint"``.
        how: ``"stop"`` (SIGSTOP), ``"sleep"``, or ``"wait"`` until the caller has done something.
    """

    def __init__(self, place: str, how: str, rank: int, step: int, here: Path) -> None:
        self.place, self.how, self.rank, self.step, self.here = place, how, rank, step, here
        self.now = 0
        self.done = False

    def at(self, place: str) -> None:
        own = place == self.place and self.now == self.step
        if not own or self.done or torch.distributed.get_rank() != self.rank:
            return
        self.done = True
        say(self.here / "began.json", time.time())
        if self.how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.how == "sleep":
            time.sleep(600)
        else:
            while not (self.here / "done").exists():
                time.sleep(0.01)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, then: Callable[[], None]) -> torch.Tensor:
        ctx.then = then
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.then()
        return grads[0], None


class Samples(torch.utils.data.Dataset[Any]):
    """Samples of which each takes some seconds to load."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor, seconds: float) -> None:
        self.inputs, self.targets, self.seconds = inputs, targets, seconds

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self.seconds)
        return self.inputs[index], self.targets[index]


class Diary(unipar.Callback):
    """Each step's loss and each checkpoint, as they happen."""

    def __init__(self, here: Path) -> None:
        self.here = here

    def on_step_end(self, run: Any, record: Any) -> None:
        self._add({"step": record.step, "loss": record.loss})

    def on_checkpoint(self, run: Any, step: int, path: Path) -> None:
        self._add({"checkpoint": step})

    def _add(self, entry: dict[str, Any]) -> None:
        with (self.here / "diary.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")


def say(path: Path, what: Any) -> None:
    """Write a file that is either whole or absent; several ranks may write the same one."""
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(what))
    unfinished.rename(path)


def before_writing(then: Callable[[], None]) -> None:
    """Call ``then`` on each rank whenever its files of a checkpoint are about to be written."""
    module: Any = sys.modules["unipar.checkpoint.save"]
    write = module.write

    def wrapped(*args: Any) -> Any:
        then()
        return write(*args)

    module.write = wrapped


def run(question: dict[str, Any], here: Path) -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(512, 32), torch.randint(0, 4, (512,))
    slow = question.get("slow", {}).get(os.environ.get("RANK"), {})
    hang = Hang(**question["hang"], here=here) if "hang" in question else None
    patched = False

    def model() -> nn.Module:
        layers = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.Tanh())]
        return nn.Sequential(*layers, nn.Linear(32, 4))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal patched
        time.sleep(slow.get("loss", 0.0) or question["pace"])
        if not patched:
            # In the workers, which this function is sent to.
            patched = True
            before_writing(partial(hang.at, "checkpoint") if hang else partial(_saving, here))
        if hang:
            hang.now += 1
            hang.at("step")
        logits = model(batch[0])
        if hang:
            logits = _Backward.apply(logits, partial(hang.at, "backward"))
        return nn.functional.cross_entropy(logits, batch[1])

    result = unipar.fit(
        model,
        Samples(inputs, targets, slow.get("data", 0.0)),
        loss=loss,
        strategy=question["strategy"],
        device="cpu",
        global_batch_size=32,
        steps=question["steps"],
        timeout=question["timeout"],
        output_dir=here / "run",
        resume="auto",
        checkpoint={"every_steps": question["every"], "async": question["async"]},
        callbacks=[Diary(here)],
        progress=False,
        **{"devices": 2, **question.get("fit", {})},
    )
    say(here / "result.json", [record.loss for record in result.history])


def _saving(here: Path) -> None:
    (here / "saving").touch()


def main(path: Path) -> int:
    question = json.loads(path.read_text())
    rank = os.environ.get("RANK", "all")
    try:
        run(question, path.parent)
    except UniparError as error:
        told = {"rank": getattr(error, "rank", None), "message": str(error)}
        say(path.parent / f"error-{rank}.json", {"type": type(error).__name__, **told})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
