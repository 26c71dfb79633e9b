"""Which cases are run against which strategies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from unipar.errors import ConfigError
from unipar.strategy import registry
from unipar.testing.cases import ALL, Case, refuses_world
from unipar.testing.kit import Kits, Target
from unipar.world import Placement

WORLD_SIZES = (1, 2, 4)
MAIN_SIZE = 2


@dataclass(frozen=True)
class Proof:
    """One case, of one strategy, at one world size.

    Attributes:
        thorough: whether what it proves is, for the most part, proved at another world size too.
    """

    target: Target
    size: int
    case: Case
    thorough: bool = False

    def __str__(self) -> str:
        return f"{self.target.name}-{self.size}-{self.case.name}"

    def run(self, kits: Kits) -> None:
        count = torch.cuda.device_count()
        if kits.pools.device_type == "cuda" and 1 != count < self.size:
            pytest.skip(f"needs {self.size} GPUs or a single one, and there are {count}")
        self.case.check(kits(self.target, self.size))


def proofs(config: pytest.Config, module: ModuleType | None) -> list[Proof]:
    """List what to run, by strategy and then world size.

    The strategies are those of ``--strategy``, or of the test module's ``STRATEGIES``; the sizes
    those of ``--world-sizes``, or ``WORLD_SIZES``. On two ranks no case is thorough, but for the
    strategies of the module's ``BRIEF``: such a one is another with an option of how ranks share
    work, and that other is proved whole. On one rank all is thorough of those.

    Raises:
        pytest.Collector.CollectError: no strategy is named, or none of that name is installed.
    """
    named = config.getoption("unipar_strategies", None)
    strategies = named or getattr(module, "STRATEGIES", ())
    if not strategies:
        raise pytest.Collector.CollectError(
            "the conformance kit needs to know what to prove: "
            "pytest --pyargs unipar.testing --strategy NAME[:option=value,…]. "
            f"Installed: {', '.join(registry.names())}."
        )
    given = config.getoption("unipar_world_sizes", None)
    sizes = _parse_sizes(given) if given else getattr(module, "WORLD_SIZES", WORLD_SIZES)
    brief = getattr(module, "BRIEF", ())
    source = "--strategy" if named else "STRATEGIES"
    return [
        proof
        for name in strategies
        for size in sizes
        for proof in _proofs_of(_target(name, source), size, brief=name in brief)
    ]


def _target(name: str, source: str) -> Target:
    try:
        return Target.named(name)
    except Exception as error:
        # Shown without a traceback, where others are errors of the tests.
        raise pytest.Collector.CollectError(f"{source} {name}: {error}") from error


def _proofs_of(target: Target, size: int, *, brief: bool) -> Sequence[Proof]:
    limit = target.make().capabilities().max_devices
    if (limit is not None and size > limit) or not _arranges(target, size):
        return [Proof(target, size, refuses_world)]
    main_size = MAIN_SIZE if limit is None else min(MAIN_SIZE, limit)

    def is_thorough(case: Case) -> bool:
        if brief:
            return size == 1 or size not in case.also_at or not case.in_brief
        return size != main_size and size not in case.also_at

    return [Proof(target, size, one, is_thorough(one)) for one in ALL if one.applies(size)]


def _arranges(target: Target, size: int) -> bool:
    try:
        target.make().layout(Placement(size=size, local_size=size))
    except ConfigError:
        return False
    return True


def _parse_sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = (0,)
    if min(sizes) < 1:
        raise pytest.Collector.CollectError(
            f"--world-sizes {text}: give whole numbers from 1, like 1,2,4"
        )
    return sizes
