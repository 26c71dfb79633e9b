"""Communication that is known to be exposed, or hidden, is found to be so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from unipar import launch
from unipar.benchmark.overlap import Profile
from unipar.benchmark.records import Overlap
from unipar.world import Placement, joined

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

SIDE, ELEMENTS = 512, 2**23
# Between the call of a collective and the computing beside it, a busy machine may let others run.
REPEATS = 5


def waiting() -> None:
    dist.all_reduce(torch.ones(ELEMENTS))


def computing_meanwhile() -> None:
    factor = torch.randn(SIDE, SIDE)
    work = dist.all_reduce(torch.ones(ELEMENTS), async_op=True)
    assert work is not None
    while not work.is_completed():
        torch.mm(factor, factor)
    work.wait()


def measure(placement: Placement) -> list[list[Overlap | None]]:
    steps = (waiting, computing_meanwhile, lambda: torch.ones(1))
    with joined(placement):
        return [[profiled(step) for _ in range(REPEATS)] for step in steps]


def profiled(step: Callable[[], object]) -> Overlap | None:
    with Profile("cpu") as watched:
        step()
    return watched.overlap


def exposed_shares(found: list[Overlap | None]) -> list[float]:
    shares = []
    for one in found:
        assert one is not None
        assert 0 < one.communication < one.step
        shares.append(one.exposed / one.communication)
    return shares


def test_what_is_waited_for_is_exposed_and_what_is_computed_beside_is_not() -> None:
    waited, beside, none = launch.run(measure, devices=2, device_type="cpu", timeout=150)
    assert none == [None] * REPEATS
    assert min(exposed_shares(waited)) > 0.9
    assert min(exposed_shares(beside)) < 0.2
