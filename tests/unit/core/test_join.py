"""What the core tells torch when it joins processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from unipar.errors import ConfigError
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
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    join(placement)
    assert [(one["backend"], one["device_id"]) for one in made] == [(backend, device)]
    assert chosen == ([] if device is None else [device])


@pytest.mark.parametrize(("shown", "index"), [(1, 0), (4, 3)])
def test_a_rank_that_is_shown_one_gpu_takes_it(
    shown: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: shown)
    placement = Placement(rank=3, size=4, local_rank=3, local_size=4, device_type="cuda")
    assert placement.device == torch.device("cuda", index)


def test_ranks_of_one_gpu_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(**given: Any) -> None:
        raise dist.DistBackendError(
            "NCCL error: invalid usage\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA"
        )

    monkeypatch.setattr(dist, "init_process_group", refusing)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"same GPU\. Start as many as there are GPUs"):
        join(Placement(local_size=2, device_type="cuda"))
