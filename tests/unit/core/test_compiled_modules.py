"""Modules that are compiled in place, as ``compile`` asks for."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from unipar.engine import checkpoint_activations, compile_modules


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


MODULES = {
    "a user's class": Own,
    "a Sequential": lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
    "a layer of torch": lambda: nn.TransformerEncoderLayer(4, 2, dropout=0.0, batch_first=True),
}


@pytest.mark.parametrize("name", MODULES)
def test_every_module_is_one_graph_with_its_hooks(name: str) -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    module, x = MODULES[name](), torch.randn(2, 3, 4)
    module.register_forward_hook(lambda module, inputs, output: output * 2)
    expected = module(x)
    names = list(module.state_dict())
    undo = compile_modules([module], {"backend": backend, "fullgraph": True})
    for _ in range(2):
        torch.testing.assert_close(module(x), expected)
    assert len(graphs) == 1
    assert list(module.state_dict()) == names
    undo()
    torch._dynamo.reset()
    module(x)
    assert len(graphs) == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize(
    "change",
    [
        lambda model: compile_modules([model], {"backend": "eager"}),
        lambda model: checkpoint_activations(model, ("Linear",)),
    ],
    ids=["compiled", "recomputed"],
)
def test_a_copy_computes_by_its_own_weights(
    change: Callable[[nn.Module], Any], copied: Callable[[nn.Module], nn.Module]
) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    plain = copy.deepcopy(model)
    change(model)
    other = copied(model)
    with torch.no_grad():
        for one in model.parameters():
            one.zero_()
    torch.testing.assert_close(other(x), plain(x))
    assert not model(x).any()
