"""Scripts for one process, acted on ranks that know nothing of each other."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unipar.compat import adopting
from unipar.compat.run import current
from unipar.errors import CheckpointError, ConfigError
from unipar.world import Placement

Found = tuple[list[float], list[str]]
"""Numbers that a script has computed, and what it was told."""


def plainly(
    placement: Placement, strategy: str | None, act: Callable[..., list[float]], *args: Any
) -> Found | str:
    """Act as a script that knows nothing of ranks; or the error that it ends by.

    Without a strategy it has the one that it asks for itself.
    """
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    monkeypatch = pytest.MonkeyPatch()
    if strategy is None:
        monkeypatch.delenv("UNIPAR_STRATEGY", raising=False)
    else:
        monkeypatch.setenv("UNIPAR_STRATEGY", strategy)
    current.stand(placement, Path("unipar.yaml"))
    logging.getLogger("unipar").addHandler(handler)
    adopting.start()
    try:
        return act(*args), told
    except (CheckpointError, ConfigError) as error:
        return str(error)
    finally:
        adopting.stop()
        current.close()
        logging.getLogger("unipar").removeHandler(handler)
        monkeypatch.undo()


def train(
    model: nn.Module,
    loss_of: Callable[[Any, torch.Tensor], torch.Tensor],
    batches: list[torch.Tensor],
) -> list[float]:
    """Losses, a number drawn after each, and at last what is in the model's state."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found = []
    for batch in batches:
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [loss.item(), torch.rand(()).item()]
    with torch.no_grad():
        return found + [one.double().sum().item() for one in model.state_dict().values()]


class Heads(nn.Module):
    """A step may leave one of them out."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.heads = nn.ModuleList([nn.Linear(width, 1), nn.Linear(width, 1)])

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](x)


def batches(*sizes: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size, 6) for size in sizes]


def check(found: list[Found | str], act: Callable[[], list[float]], told: str = "") -> None:
    """Each rank has what one process has without unipar, and is told so much, or nothing."""
    expected = act()
    for rank, one in enumerate(found):
        assert isinstance(one, tuple), one
        assert one[0] == pytest.approx(expected, rel=2e-4, abs=1e-5)
        if rank == 0 and told:
            assert any(told in line for line in one[1]), one[1]
        else:
            assert not one[1], one[1]
