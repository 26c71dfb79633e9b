"""A script under its framework and under the framework's face, in turns.

Each has processes of its own. It is run in the framework's environment, and imports the framework
once: ranks are forked from there.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

# Before torch is imported: threads of its own would compete with the other processes.
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import nn
from torch.utils.data import TensorDataset

from examples.gpt import GPT
from measure.frameworks import answer
from measure.ports import free_port
from measure.speed import overhead
from measure.speed.timing import BASELINE, in_turns

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
FACE, AGAIN = "the face", "the framework again"
PATIENCE = 240.0
"""Seconds that a block may take, or all that comes before the first."""

Sides = dict[str, tuple[Callable[["Job"], None], dict[str, str]]]
"""By name what each rank calls, and variables of its environment."""


class Step(NamedTuple):
    """What a step takes: seconds by the clock, and of a processor."""

    clock: float
    processor: float


_FORKS = multiprocessing.get_context("fork")
_WARMUP = 3


class Job:
    """What a script trains, and when.

    Args:
        program: ``tiny`` or ``gpt``.
        ranks: how many processes there are.
        link: to the process that says whose turn it is.

    Attributes:
        ranks: how many processes there are.
        data: of pairs of inputs and targets.
        batch_size: of a rank.
    """

    def __init__(self, program: str, ranks: int, link: Connection) -> None:
        self.ranks, self._link, self._program = ranks, link, program
        draw = torch.Generator().manual_seed(0)
        if program == "tiny":
            self.batch_size = 32
            inputs = torch.randn(4096, 32, generator=draw)
            targets = torch.randint(0, 10, (4096,), generator=draw)
        else:
            self.batch_size = 8
            text = torch.randint(0, 256, (512, 65), generator=draw)
            inputs, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        self.data = TensorDataset(inputs, targets)

    def model(self) -> nn.Module:
        """A new one, the same on all ranks."""
        if self._program == "tiny":
            return overhead.model()
        torch.manual_seed(0)
        return GPT(length=64)

    @staticmethod
    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean over all predictions."""
        return nn.functional.cross_entropy(output.flatten(0, -2), targets.flatten())

    def turns(self, loader: Any) -> Iterator[Any]:
        """The batches of a loader without end, in blocks that wait until they are asked for."""
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
        steps = _WARMUP
        while steps:
            began, used = time.perf_counter(), time.process_time()
            for _ in range(steps):
                yield next(batches)
            used = time.process_time() - used
            self._link.send(((time.perf_counter() - began) / steps, used / steps))
            steps = self._link.recv()


class Side:
    """The ranks of a script that is run in one way.

    Args:
        train: has ``Job`` trained; called in each rank.
        program: as for :class:`Job`.
        ranks: how many.
        settings: variables of the environment, besides those that a launcher sets.
        log: what they print.
    """

    def __init__(
        self,
        train: Callable[[Job], None],
        program: str,
        ranks: int,
        settings: dict[str, str],
        log: Path,
    ) -> None:
        self._log, self._links, self._processes = log, [], []
        port = free_port()
        for rank in range(ranks):
            here, there = _FORKS.Pipe()
            told = {
                "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            }  # fmt: skip
            variables = settings | {name: str(value) for name, value in told.items()}
            process = _FORKS.Process(
                target=_rank, args=(train, program, ranks, there, variables, log), daemon=True
            )
            process.start()
            there.close()
            self._links.append(here)
            self._processes.append(process)

    def took(self) -> Step:
        """What a step of the block that was asked for took.

        Returns:
            By the clock that of the slowest rank; of a processor the mean over ranks.

        Raises:
            SystemExit: a rank has ended, or does not answer.
        """
        found = []
        for link in self._links:
            try:
                if not link.poll(PATIENCE):
                    raise EOFError
                found.append(Step(*link.recv()))
            except (EOFError, ConnectionError):
                sys.exit(
                    f"A rank came to no step; it had printed:\n{self._log.read_text()[-4000:]}"
                )
        return Step(max(one.clock for one in found), mean(one.processor for one in found))

    def block(self, steps: int) -> Step:
        """Have all ranks take some steps; see :meth:`took`."""
        for link in self._links:
            link.send(steps)
        return self.took()

    def close(self) -> None:
        """End the ranks."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _rank(
    train: Callable[[Job], None],
    program: str,
    ranks: int,
    link: Connection,
    variables: dict[str, str],
    log: Path,
) -> None:
    # A rank that nobody reads any more ends with its link, and all with their parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(variables)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with contextlib.suppress(EOFError, BrokenPipeError):
        train(Job(program, ranks, link))
    # Threads of frameworks may wait for ranks that are gone.
    os._exit(0)


def as_it_is(name: str, *, around: str = "") -> Callable[[Job], None]:
    """A script's ``train``.

    Args:
        name: of the script.
        around: a context in which it is called, as ``module:function``.
    """
    module, _, function = around.partition(":")

    def train(job: Job) -> None:
        context = contextlib.nullcontext()
        if around:
            context = getattr(importlib.import_module(module), function)()
        with context:
            importlib.import_module(f"measure.scripts.{name}").train(job)

    return train


def migrated(name: str) -> Callable[[Job], None]:
    """The same by the framework's face, as ``unipar migrate`` writes it.

    Raises:
        SystemExit: it refuses the script.
    """
    from unipar.migrate import migrate_source

    file = SCRIPTS / f"{name}.py"
    found = migrate_source(file.read_text())
    if not found.changed:
        sys.exit(f"unipar migrate leaves {file} as it is: {found.notes}")

    def train(job: Job) -> None:
        module = types.ModuleType(f"migrated_{name}")
        # Where a decorator or a pickle looks for it.
        sys.modules[module.__name__] = module
        exec(compile(found.code, str(file), "exec"), module.__dict__)
        module.train(job)

    return train


def measure(asked: dict[str, Any]) -> dict[str, Any]:
    """Measure what is asked for.

    Args:
        asked: ``script``, ``package``, ``preload`` and ``around`` of it, ``settings`` of the face,
            whether the framework runs beside itself (``again``), ``cells`` of ``program``,
            ``ranks``, ``turns`` and ``steps``, how many ``rounds`` of them, and ``seconds`` after
            which none begins.

    Returns:
        ``version`` of the package, and for each of ``cells`` what a step takes by side, one of each
        round.
    """
    warnings.simplefilter("ignore")
    began = time.monotonic()
    module, _, function = asked["preload"].partition(":")
    loaded = importlib.import_module(module)
    if function:
        getattr(loaded, function)()
    sides: Sides = {
        BASELINE: (as_it_is(asked["script"], around=asked["around"]), {}),
        FACE: (migrated(asked["script"]), asked["settings"]),
    }
    if asked["again"]:
        sides[AGAIN] = sides[BASELINE]
    gc.collect()
    # A collection in a rank would copy the pages that it shares with the others.
    gc.freeze()
    cells: list[dict[str, list[Step]]] = [{name: [] for name in sides} for _ in asked["cells"]]
    for number in range(asked["rounds"]):
        # New processes every round, which is a measurement: where a model happens to lie in memory
        # is worth more than what differs from turn to turn.
        for cell, measured in zip(asked["cells"], cells, strict=True):
            if number and time.monotonic() - began > asked["seconds"]:
                break
            for name, values in _round(sides, **cell).items():
                measured[name].append(Step(*map(median, zip(*values, strict=True))))
    return {"version": version(asked["package"]), "cells": cells}


def _round(
    sides: Sides,
    program: str,
    ranks: int,
    turns: int,
    steps: int,
) -> dict[str, list[Step]]:
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        started = {}
        for number, (name, (train, settings)) in enumerate(sides.items()):
            log = Path(directory, f"{number}.txt")
            started[name] = side = Side(train, program, ranks, settings, log)
            stack.callback(side.close)
        for side in started.values():
            side.took()
        blocks = {name: (lambda side=side: side.block(steps)) for name, side in started.items()}
        in_turns(blocks, 2)
        return in_turns(blocks, turns)


if __name__ == "__main__":
    answer(measure)
