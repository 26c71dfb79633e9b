"""Saving and loading beside a bare ``torch.distributed.checkpoint``; what saves cost training."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader as loader
from torch.distributed.checkpoint import state_dict_saver as saver
from torch.distributed.checkpoint.state_dict import get_state_dict

import unipar
from examples.gpt import GPT, loss
from measure.report import Row, mebibytes, milliseconds, whole_seconds
from measure.speed.timing import BASELINE, in_turns
from unipar import checkpoint, launch
from unipar.config import CheckpointConfig
from unipar.train.checkpointing import Saver

OURS = "ours"
LENGTH = 16
STEPS = 50
"""Steps from one save to the next, where their price is measured."""
Figures = dict[str, dict[str, list[float]]]


def measure(*, quick: bool) -> list[Row]:
    """Weights and AdamW's moments, whole on one process and sharded on two."""
    turns = 2 if quick else 9
    sizes = {"layers": 1, "width": 128} if quick else {"layers": 8, "width": 512}
    rows = []
    for strategy, ranks in (("single", 1), ("fsdp", 2)):

        def work(placement: unipar.Placement, strategy: str = strategy) -> tuple[int, Figures]:
            return measure_rank(placement, strategy, sizes, turns)

        size, figures = launch.run(work, devices=ranks, timeout=300)
        for what, values in figures.items():
            rows.append(
                Row.timed(
                    f"{what}, {mebibytes(size)}, `{strategy}` on {ranks}, "
                    "beside `torch.distributed.checkpoint`",
                    values[OURS],
                    values[BASELINE],
                    mebibytes if "memory" in what else whole_seconds,
                    1.1,
                )
            )
    return [*rows, *prices(quick=quick)]


def prices(*, quick: bool) -> list[Row]:
    """A step of a run that saves each 50 steps, beside the same steps without: one rank."""
    sizes = {"layers": 1, "width": 128} if quick else {"layers": 8, "width": 512}
    rows = []
    for mode, how in (("auto", "in the background"), (False, "while training waits")):

        def work(placement: unipar.Placement, mode: Any = mode) -> tuple[int, Any]:
            return price(placement, mode, sizes, 2 if quick else 4)

        size, values = launch.run(work, devices=1, timeout=1800)
        rows.append(
            Row.timed(
                f"a step with a save each {STEPS}, {how}, {mebibytes(size)}, `single` on 1, "
                "beside the same steps without",
                values[OURS],
                values[BASELINE],
                milliseconds,
                1.02 if mode else None,
            )
        )
    return rows


def price(
    placement: unipar.Placement, mode: Any, sizes: dict[str, int], turns: int
) -> tuple[int, dict[str, list[float]]]:
    """Bytes that are stored; and seconds of a step by contender and turn, a turn of 50 steps."""
    torch.set_num_threads(1)
    length = 8 * LENGTH
    scratch = tempfile.TemporaryDirectory(prefix="unipar-bench-")
    with scratch, unipar.Session(strategy="single", placement=placement) as session:
        engine = session.prepare(
            GPT(length=length, **sizes),
            optimizer=lambda named: torch.optim.AdamW([p for _, p in named]),
        )
        text = torch.zeros(2, length, dtype=torch.long)
        batch = unipar.Batch((unipar.MicroBatch((text, text), 2),), 2)
        settings = CheckpointConfig.model_validate({"every_steps": STEPS, "async": mode})
        saver = Saver(Path(scratch.name), settings, session)
        saves = 0

        def saving() -> float:
            nonlocal saves
            saves += STEPS
            began = time.perf_counter()
            engine.train_step(batch, loss)
            saver.save(saves, {}, {})
            for _ in range(STEPS - 1):
                engine.train_step(batch, loss)
                saver.collect()
            seconds = time.perf_counter() - began
            saver.wait()
            return seconds / STEPS

        def bare() -> float:
            began = time.perf_counter()
            for _ in range(STEPS):
                engine.train_step(batch, loss)
            return (time.perf_counter() - began) / STEPS

        contenders = {OURS: saving, BASELINE: bare}
        # The first save also takes the memory that the later ones use again.
        engine.train_step(batch, loss)
        saver.save(1, {}, {})
        saver.wait()
        size = 12 * sum(p.numel() for p in engine.module.parameters())
        return size, in_turns(contenders, turns)


def measure_rank(
    placement: unipar.Placement, strategy: str, sizes: dict[str, int], turns: int
) -> tuple[int, Figures]:
    """Bytes that are stored; and seconds and peak bytes by what was done, contender and turn."""
    torch.set_num_threads(1)
    with unipar.Session(strategy=strategy, placement=placement) as session:
        engine = session.prepare(
            GPT(length=LENGTH, **sizes),
            optimizer=lambda named: torch.optim.AdamW([p for _, p in named]),
        )
        text = torch.zeros(2, LENGTH, dtype=torch.long)
        batch = unipar.Batch((unipar.MicroBatch((text, text), 2),), 2 * placement.size)
        engine.train_step(batch, loss)
        assert engine.optimizer is not None
        weights, moments = get_state_dict(engine.module, engine.optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": moments}
        size = 12 * sum(p.numel() for p in engine.module.parameters())

        with tempfile.TemporaryDirectory(prefix="unipar-bench-") as scratch:
            directory = Path(session.world.broadcast(scratch))
            meter = _Meter(session.world)
            ours, plain = directory / "ours", directory / "plain"
            path = ours / "step-00000001"
            alone = placement.size == 1
            figures: Figures = {}
            for what, contenders in {
                "save": {
                    OURS: meter.of(
                        OURS,
                        lambda: checkpoint.save(ours, session.engines, session.world, step=1),
                        empty=ours,
                    ),
                    BASELINE: meter.of(
                        BASELINE,
                        lambda: saver.save(state, checkpoint_id=plain, no_dist=alone),
                        empty=plain,
                    ),
                },
                "load": {
                    OURS: meter.of(
                        OURS, lambda: checkpoint.load(path, session.engines, session.world)
                    ),
                    BASELINE: meter.of(
                        BASELINE, lambda: loader.load(state, checkpoint_id=plain, no_dist=alone)
                    ),
                },
            }.items():
                # The first of each also imports and warms up.
                in_turns(contenders, 1)
                meter.taken()
                figures[f"{what}, time"] = in_turns(contenders, turns)
                figures[f"{what}, peak memory of rank 0"] = meter.taken()
        return size, figures


class _Meter:
    """Takes the time of what all ranks do together, and the peak of this process's memory."""

    def __init__(self, world: unipar.World) -> None:
        self.world = world
        self.peaks: dict[str, list[float]] = defaultdict(list)

    def taken(self) -> dict[str, list[float]]:
        """The peaks since the last time that this was asked, in bytes, by name."""
        taken = dict(self.peaks)
        self.peaks.clear()
        return taken

    def of(
        self, name: str, act: Callable[[], object], empty: Path | None = None
    ) -> Callable[[], float]:
        """``act``, measured; ``empty`` is a directory to remove first, untimed."""

        def run() -> float:
            if empty is not None and self.world.is_main:
                shutil.rmtree(empty, ignore_errors=True)
            # Makes the kernel forget the highest resident size until now (Linux, proc(5)).
            Path("/proc/self/clear_refs").write_text("5")
            self.world.barrier()
            began = time.perf_counter()
            act()
            self.world.barrier()
            seconds = time.perf_counter() - began
            status = Path("/proc/self/status").read_text().splitlines()
            peak = next(line for line in status if line.startswith("VmHWM"))
            self.peaks[name].append(int(peak.split()[1]) * 1024)
            return seconds

        return run
