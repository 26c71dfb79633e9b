"""Where ``zero.Init`` takes random numbers from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from unipar.compat.deepspeed import zero
from unipar.compat.deepspeed.runtime import zero as own


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is drawn as if by a GPU: by the host's generator, which stands for it."""
    found: list[str] = []

    class Told(own._Drawing):
        def __init__(self, device: Any) -> None:
            super().__init__(torch.device("cpu"))

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            given = dict(kwargs or {})
            result = super().__torch_function__(func, types, args, kwargs)
            if func in self.FILLS or func in self.LIKE or func is torch.randn:
                found.append("own" if given.get("generator") is not None else func.__name__)
            return result

    monkeypatch.setattr(own, "_Drawing", Told)
    monkeypatch.setattr(own, "_on_gpu", lambda: True)
    return found


def build() -> list[torch.Tensor]:
    torch.manual_seed(4)
    layer = nn.Linear(3, 3)
    nn.init.orthogonal_(layer.weight)
    noise = [torch.randn(2, requires_grad=True), torch.rand(2), torch.randint(9, (2,))]
    alike = [torch.randn_like(noise[0]), torch.rand_like(noise[1])]
    generator = torch.Generator().manual_seed(1)
    return [*layer.parameters(), *noise, *alike, torch.randn(2, generator=generator)]


def test_models_are_built_on_the_host_by_numbers_of_the_device(drawn: list[str]) -> None:
    plain = build()
    with zero.Init():
        found = build()
    assert drawn == [
        *("kaiming_uniform_", "uniform_", "normal_", "randn"), *("randn_like", "rand_like", "own"),
    ]  # fmt: skip
    for before, after in zip(plain, found, strict=True):
        assert torch.equal(before, after)
        assert after.is_cpu
        assert after.is_leaf
        assert before.requires_grad == after.requires_grad
    drawn.clear()
    with zero.Init(enabled=False):
        build()
    with zero.Init(), torch.device("meta"):
        assert torch.randn(2).is_meta
    assert drawn == ["randn"]


def test_weights_that_are_gathered_are_drawn_so_if_they_were_built_so(drawn: list[str]) -> None:
    with zero.Init():
        layer = nn.Linear(2, 2)
    drawn.clear()
    with zero.GatheredParameters([nn.Linear(2, 2).weight]):
        nn.init.normal_(layer.weight)
    with zero.GatheredParameters(layer.weight, enabled=False):
        nn.init.normal_(layer.weight)
    assert not drawn
    with zero.GatheredParameters(layer.weight):
        nn.init.normal_(layer.weight)
    assert drawn == ["normal_"]
    nn.init.normal_(layer.weight)
    assert drawn == ["normal_"]
