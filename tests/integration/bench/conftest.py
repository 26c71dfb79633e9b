"""Strategies that are slow, train wrongly, hang or die, installed for the length of a module."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

STRATEGIES = '''
import time

import torch

from unipar_torch.ddp import DDPOptions, DDPStrategy

SLEEP = 0.3
LEAK = 2**20


class SlowOptions(DDPOptions):
    strategy = "slow"


class Slow(DDPStrategy):
    """Sleeps for so many seconds in each step, and keeps so many more bytes."""

    name = "slow"
    options_type = SlowOptions

    def prepare(self, spec, world):
        engine, kept = super().prepare(spec, world), []
        engine.kept = kept

        def sleep_and_leak():
            time.sleep(SLEEP)
            kept.append(torch.ones(LEAK // 4))

        return _before_each_step(engine, sleep_and_leak)


class WrongOptions(DDPOptions):
    strategy = "wrong"


class Wrong(DDPStrategy):
    """Makes each gradient a tenth too large."""

    name = "wrong"
    options_type = WrongOptions

    def prepare(self, spec, world):
        engine = super().prepare(spec, world)
        for parameter in engine.module.parameters():
            parameter.register_hook(lambda gradient: 1.1 * gradient)
        return engine


class HangingOptions(DDPOptions):
    strategy = "hanging"


class Hanging(DDPStrategy):
    """Never ends its first step."""

    name = "hanging"
    options_type = HangingOptions

    def prepare(self, spec, world):
        return _before_each_step(super().prepare(spec, world), lambda: time.sleep(3600))


class DyingOptions(DDPOptions):
    strategy = "dying"


class Dying(DDPStrategy):
    """Is killed in its first step."""

    name = "dying"
    options_type = DyingOptions

    def prepare(self, spec, world):
        import os

        return _before_each_step(super().prepare(spec, world), lambda: os.kill(os.getpid(), 9))


def _before_each_step(engine, work):
    step = engine.train_step

    def train_step(batch, loss_fn):
        work()
        return step(batch, loss_fn)

    engine.train_step = train_step
    return engine
'''


@pytest.fixture(scope="module")
def odd_strategies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory that they are installed in, on ``PYTHONPATH``."""
    site = tmp_path_factory.mktemp("site")
    info = site / "odd-1.0.dist-info"
    info.mkdir()
    names = ("slow", "wrong", "hanging", "dying")
    points = "\n".join(f"{name} = odd_strategies:{name.capitalize()}" for name in names)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[unipar.strategies]\n{points}\n")
    (site / "odd_strategies.py").write_text(textwrap.dedent(STRATEGIES))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
        patch.syspath_prepend(site)
        yield site
