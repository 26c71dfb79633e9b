"""Batches of tensors are taken of each at once, and are what stacked samples would be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset, default_collate

from unipar.data import Loader
from unipar.errors import DataError

torch.manual_seed(0)
X, Y = torch.randn(10, 3, 4, 5), torch.arange(10)
DATA = {
    "tensor": X,
    "tuple": (X, Y),
    "one column": (X,),
    "dataset": TensorDataset(X, Y),
    "loader": DataLoader(TensorDataset(X, Y), batch_size=2, shuffle=True),
    "numbers": Y,
    "channels last": X.to(memory_format=torch.channels_last),
    "a part of each": (X[:, :2], Y),
    "one value for all": torch.ones(1, 3).expand(10, 3),
    "booleans": Y > 4,
    "complex": torch.view_as_complex(torch.randn(10, 3, 2)).conj(),
    "with gradient": torch.randn(10, 3, requires_grad=True),
}


def batches(data: Any, **settings: Any) -> list[Any]:
    loader = Loader(data, global_batch_size=4, micro_batch_size=2, seed=3, **settings)
    return [(part.num_samples, part.data) for batch in loader for part in batch]


def described(data: Any) -> Any:
    if isinstance(data, torch.Tensor):
        return data.dtype, data.shape, data.stride(), data.requires_grad, data.tolist()
    return type(data), [described(part) for part in data]


@pytest.mark.parametrize("name", DATA)
def test_a_batch_is_what_default_collate_makes_of_its_samples(name: str) -> None:
    found = batches(DATA[name])
    expected = batches(DATA[name], collate_fn=lambda samples: default_collate(samples))
    assert [(n, described(data)) for n, data in found] == [
        (n, described(data)) for n, data in expected
    ]


class Operations(TorchDispatchMode):
    """Counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def num_operations(data: Any, batch_size: int) -> int:
    loader = iter(Loader(data, global_batch_size=batch_size))
    with Operations() as operations:
        next(loader)
    return operations.count


@pytest.mark.parametrize("data", [X, (X, Y), TensorDataset(X, Y)], ids=["one", "two", "dataset"])
def test_a_larger_batch_takes_no_more_operations(data: Any) -> None:
    assert num_operations(data, 8) == num_operations(data, 2)


def test_sparse_tensors_are_refused_as_they_are_one_by_one() -> None:
    with pytest.raises(DataError, match="sparse"):
        batches((X.flatten(1).to_sparse(), Y))
