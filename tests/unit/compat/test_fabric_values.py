"""What a script reads, sets and exchanges behind Fabric's face is what it is in Fabric."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from unipar.compat.accelerate import Accelerator
from unipar.compat.fabric import Fabric
from unipar.compat.fabric.utilities import AttributeDict
from unipar.compat.fabric.wrappers import _unwrap_objects
from unipar.compat.run import current

pytestmark = pytest.mark.usefixtures("alone")
CPU: dict[str, Any] = {"accelerator": "cpu", "devices": 1}


class Annealed(nn.Linear):
    """Its attributes have names that a wrapper might have for itself."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self._temperature, self._half, self._device = 1.0, "half", "device"
        self.shapes, self.calls, self.beta = "shapes", 0, 2.0
        self._scale: Any
        self.register_buffer("_scale", torch.ones(()))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self._temperature * self._scale

    def share(self) -> str:
        return "share"

    def bare(self) -> str:
        return "bare"


def prepared(kind: str, net: nn.Module) -> Any:
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    if kind == "accelerate":
        return Accelerator(cpu=True).prepare(net, sgd)[0]
    return Fabric(**CPU, strategy=kind).setup(net, sgd)[0]


@pytest.mark.parametrize("kind", ["auto", "ddp", "accelerate"])
def test_what_is_set_on_a_prepared_model_is_its_models(kind: str) -> None:
    net, x = Annealed(), torch.randn(4, 3)
    model = prepared(kind, net)
    before = model(x)
    model._temperature *= 0.5
    model._scale = torch.full((), 3.0)
    assert torch.allclose(model(x), 1.5 * before)
    assert (model.shapes, model.share(), model.bare()) == ("shapes", "share", "bare")
    assert (model._half, model._device) == ("half", "device")
    model.calls += 1
    model.beta, model._half, model.shapes, model._new = 0.5, 1, 2, 3
    assert (net.calls, net.beta, net._half, net.shapes, net._new) == (1, 0.5, 1, 2, 3)
    model.training = False
    assert not net.training
    model.train()
    assert net.training
    # Torch's own notes of hooks stay where the hooks are.
    model.register_full_backward_hook(seen := mock.Mock(return_value=None))
    model(x.requires_grad_()).sum().backward()
    assert seen.called


@dataclass
class Figures:
    loss: torch.Tensor
    count: int


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_values_are_exchanged_whatever_holds_them(strategy: str) -> None:
    theirs = pytest.importorskip("lightning_fabric")
    given: Any = [
        AttributeDict(loss=torch.tensor(1.5), count=2), Counter(a=3), Figures(torch.ones(2), 4),
        {"deep": (deque([1.0]), "text", None)}, torch.ones(2, 3), 5, True,
    ]  # fmt: skip

    def exchanged(fabric: Any) -> list[Any]:
        fabric.launch()
        gathered, reduced = fabric.all_gather(given), fabric.all_reduce(given)
        assert [type(one) for one in gathered[:4]] == [AttributeDict, Counter, Figures, dict]
        return [plain(one) for one in (*gathered, *reduced)]

    found = exchanged(Fabric(**CPU, strategy=strategy))
    current.close()
    # It says there where it stands.
    with mock.patch.dict("os.environ"):
        try:
            expected = exchanged(theirs.Fabric(**CPU, strategy=strategy))
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
    assert found == expected


def plain(value: Any) -> Any:
    """What it holds, tensors as a shape and numbers; Fabric has int32 of a Python number."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.tolist()
    if isinstance(value, Figures):
        return plain(vars(value))
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, (list, tuple, deque)) else value


def test_gathered_on_one_rank_there_are_gradients_if_so_asked() -> None:
    fabric = Fabric(**CPU, strategy="ddp")
    x = torch.ones(2, requires_grad=True)
    assert not fabric.all_gather(x).requires_grad
    fabric.all_gather(x, sync_grads=True).sum().backward()
    assert x.grad is not None


def test_what_is_set_up_is_given_back_whatever_holds_it() -> None:
    fabric, net = Fabric(**CPU), nn.Linear(3, 1)
    model = fabric.setup(net)
    assert _unwrap_objects(AttributeDict(model=model)).model is net
    assert _unwrap_objects(MappingProxyType({"model": model}))["model"] is net
