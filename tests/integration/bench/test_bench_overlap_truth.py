"""Communication that is known to be exposed, or hidden, is found to be so."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from unipar import launch
from unipar.benchmark.overlap import Profile
from unipar.benchmark.records import Overlap
from unipar.world import Placement, joined

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

SIDE, ELEMENTS = 512, 2**23


def waiting() -> None:
    dist.all_reduce(torch.ones(ELEMENTS))


def computing_meanwhile() -> None:
    factor = torch.randn(SIDE, SIDE)
    work = dist.all_reduce(torch.ones(ELEMENTS), async_op=True)
    assert work is not None
    while not work.is_completed():
        torch.mm(factor, factor)
    work.wait()


def measure(placement: Placement) -> tuple[Overlap | None, ...]:
    found = []
    with joined(placement):
        for step in (waiting, computing_meanwhile, lambda: torch.ones(1)):
            with Profile("cpu") as watched:
                step()
            found.append(watched.overlap)
    return tuple(found)


def test_what_is_waited_for_is_exposed_and_what_is_computed_beside_is_not() -> None:
    exposed, hidden, none = launch.run(measure, devices=2, device_type="cpu", timeout=150)
    assert none is None
    assert exposed is not None
    assert hidden is not None
    assert exposed.exposed > 0.9 * exposed.communication
    assert hidden.exposed < 0.2 * hidden.communication
    for one in (exposed, hidden):
        assert 0 < one.communication < one.step
