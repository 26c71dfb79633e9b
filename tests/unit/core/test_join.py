"""What the core tells torch when it joins processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from unipar.world import Placement, join


@pytest.mark.parametrize(
    ("placement", "backend", "device"),
    [
        (Placement(), "gloo", None),
        (
            Placement(local_rank=1, device_type="cuda"),
            "cpu:gloo,cuda:nccl",
            torch.device("cuda", 1),
        ),
    ],
    ids=["cpu", "cuda"],
)
def test_a_group_is_bound_to_the_ranks_own_gpu(
    placement: Placement,
    backend: str,
    device: torch.device | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[dict[str, Any]] = []
    chosen: list[torch.device] = []
    monkeypatch.setattr(dist, "init_process_group", lambda **given: made.append(given))
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    join(placement)
    assert [(one["backend"], one["device_id"]) for one in made] == [(backend, device)]
    assert chosen == ([] if device is None else [device])
