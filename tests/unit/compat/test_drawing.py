"""Where ``zero.Init`` takes random numbers from."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from unipar.compat.deepspeed import zero
from unipar.compat.deepspeed.runtime import zero as own


class Device:
    """Stands for a GPU: draws by the host's generator, and counts how often."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drawn = 0
        monkeypatch.setattr(own, "_drawing", lambda: self.mode())

    def mode(self) -> own._Drawing:
        counted = self

        class Counted(own._Drawing):
            def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
                counted.drawn += func in self.FILLS or func in self.CREATES
                return super().__torch_function__(func, types, args, kwargs)

        return Counted(torch.device("cpu"))


def build() -> list[torch.Tensor]:
    torch.manual_seed(4)
    layer = nn.Linear(3, 3)
    nn.init.orthogonal_(layer.weight)
    noise = torch.randn(2), torch.rand(2), torch.randint(9, (2,)), torch.randperm(4)
    own_generator = torch.Generator().manual_seed(1)
    return [*layer.parameters(), *noise, torch.randn(2, generator=own_generator)]


def test_models_are_built_on_the_host_by_numbers_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = build()
    device = Device(monkeypatch)
    with zero.Init():
        drawn = build()
    # Weight, bias, the weight again, four tensors; and one by a generator of the script's own.
    assert device.drawn == 8
    assert all(torch.equal(a, b) and b.is_cpu for a, b in zip(plain, drawn, strict=True))
    with zero.Init(enabled=False):
        build()
    assert device.drawn == 8
    with zero.GatheredParameters([torch.zeros(2)]):
        torch.zeros(2).normal_()
    assert device.drawn == 9
    build()
    assert device.drawn == 9
