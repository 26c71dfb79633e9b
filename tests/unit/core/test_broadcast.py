"""Many small tensors travel in few messages, whatever their dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from unipar.engine import broadcast, broadcast_tensors
from unipar.world import Placement, World


def tensors(value: float) -> list[torch.Tensor]:
    return [
        torch.full((), value),
        torch.full((3, 2), value).t(),
        torch.full((0, 4), value),
        torch.full((5,), value, dtype=torch.bfloat16),
        torch.full((2,), bool(value)),
        torch.full((7,), value, dtype=torch.complex64),
        torch.full((40,), value),
        torch.full((), int(value), dtype=torch.int64),
        torch.full((3,), value).to(torch.float8_e4m3fn),
    ]


@pytest.mark.parametrize(("limit", "messages"), [(2**20, 6), (30, 7), (1, 8)])
def test_one_message_for_each_dtype_and_size(
    limit: int, messages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[torch.Tensor] = []

    def send(flat: torch.Tensor, src: int, group: Any = None) -> None:
        assert (flat.dtype, flat.ndim, src, group) == (torch.uint8, 1, 0, None)
        sent.append(flat.clone())

    monkeypatch.setattr(broadcast, "_MESSAGE_BYTES", limit)
    monkeypatch.setattr(dist, "broadcast", send)
    theirs = tensors(1.0)
    broadcast_tensors(theirs, World(Placement(size=2)))
    assert len(sent) == messages

    def receive(flat: torch.Tensor, src: int, group: Any = None) -> None:
        flat.copy_(sent.pop(0))

    monkeypatch.setattr(dist, "broadcast", receive)
    own = tensors(0.0)
    broadcast_tensors(own, World(Placement(rank=1, size=2)))
    assert [one.tolist() for one in own] == [one.tolist() for one in theirs]


def test_a_rank_that_is_alone_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "broadcast", None)
    broadcast_tensors(tensors(1.0), World(Placement()))
