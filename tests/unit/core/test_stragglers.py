"""Which ranks count as slow, by the times of all."""

from __future__ import annotations

import torch

from unipar.train.stragglers import STEPS, Stragglers
from unipar.world import Placement, World


def watching(size: int) -> tuple[Stragglers, list[tuple[str, int, str]]]:
    noted: list[tuple[str, int, str]] = []
    hosts = [f"host{rank}" for rank in range(size)]
    world = World(Placement(size=size))
    return Stragglers(world, hosts, lambda *told: noted.append(told)), noted


def computing(own: list[list[float]]) -> torch.Tensor:
    """Ranks that have their batches at once."""
    times = torch.tensor(own)
    return torch.stack([torch.zeros_like(times), times], dim=-1)


def test_every_one_of_the_steps_is_slow_or_none_is():
    found, noted = watching(4)
    even = [[0.1] * STEPS] * 3
    for odd in (0.0, 0.14, 0.2):
        found.compare(computing([*even, [0.2] * (STEPS - 1) + [odd]]))
    assert noted == [("slow", 3, "host3")]
    for odd in (0.2, 0.14):
        found.compare(computing([*even, [0.1] * (STEPS - 1) + [odd]]))
    assert noted[1:] == [("recovered", 3, "host3")]


def test_of_two_ranks_the_faster_one_is_the_measure():
    found, noted = watching(2)
    for _ in range(2):
        found.compare(computing([[0.2] * STEPS, [0.1] * STEPS]))
    assert noted == [("slow", 0, "host0")]


def test_less_than_a_millisecond_is_nothing():
    found, noted = watching(2)
    found.compare(computing([[0.0002] * STEPS, [0.0010] * STEPS]))
    assert noted == []


def test_ranks_that_are_slow_together_are_the_median():
    found, noted = watching(3)
    found.compare(computing([[0.1, 0.5] * (STEPS // 2)] * 3))
    assert noted == []


def test_a_rank_whose_batches_are_late_is_found_where_others_wait_in_the_forward_pass():
    found, noted = watching(3)
    own = torch.full((3, STEPS), 0.3)
    late = torch.zeros(3, STEPS)
    # Of 0.3 s for all they take 0.22 s without it.
    late[1] = 0.08
    found.compare(torch.stack([late, own], dim=-1))
    assert noted == []
    late[1] = 0.12
    found.compare(torch.stack([late, own], dim=-1))
    assert noted == [("slow", 1, "host1")]
