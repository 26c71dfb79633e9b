"""Samples and batches whose errors say where they come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import Dataset

from unipar.batch import Batch
from unipar.errors import DataError


class Samples(Dataset):
    """A map-style dataset that names the rank and the index when a sample raises."""

    def __init__(self, dataset: Any, rank: int) -> None:
        self._dataset, self._rank = dataset, rank
        self._fetch = getattr(dataset, "__getitems__", None)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        try:
            return self._dataset[index]
        except Exception as error:
            raise DataError(
                f"rank {self._rank}: sample {index} of {type(self._dataset).__name__} raised "
                f"{type(error).__name__}: {error}. Mend or leave out that sample."
            ) from error

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if self._fetch is not None:
            try:
                return self._fetch(indices)
            except Exception:
                # One of them raises: fetched one by one, the culprit names itself.
                return [self[index] for index in indices]
        return [self[index] for index in indices]


class Collate:
    """A collate function that says which samples do not go together."""

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        self._function = function

    def __call__(self, samples: list[Any]) -> Any:
        try:
            return self._function(samples)
        except DataError:
            raise
        except Exception as error:
            kinds = sorted({_describe(structure(sample, shapes=True)) for sample in samples})
            raise DataError(
                f"{len(samples)} samples do not make a batch ({type(error).__name__}: {error}). "
                f"They are: {'; '.join(kinds[:4])}. Pad them to one shape in the dataset, or "
                "pass a DataLoader with a collate_fn that does."
            ) from error


def structure(data: Any, *, shapes: bool = False) -> Any:
    """What ``data`` is made of: containers, keys and tensor dtypes, without values."""
    if isinstance(data, torch.Tensor):
        return (data.dtype, tuple(data.shape)) if shapes else data.dtype
    if isinstance(data, Mapping):
        parts = [(str(key), structure(value, shapes=shapes)) for key, value in data.items()]
        return ("mapping", *sorted(parts, key=lambda part: part[0]))
    if isinstance(data, (list, tuple)):
        # Lists of plain values (file names, say) may differ in length from batch to batch.
        parts = [structure(item, shapes=shapes) for item in data]
        plain = isinstance(data, list) and all(isinstance(part, str) for part in parts)
        return ("list of", *sorted(set(parts))) if plain else (type(data).__name__, *parts)
    return type(data).__name__


def raise_different(expected: Any, found: Any, batch: Batch) -> None:
    """Raise :class:`DataError` that says how a batch differs from those before it."""
    raise DataError(
        f"batch {batch.index} of epoch {batch.epoch} is made differently from those before it: "
        f"it is {_describe(found)}, and they were {_describe(expected)}. "
        "Make the dataset (or the collate_fn) return the same keys and types for every sample."
    )


def _describe(made_of: Any) -> str:
    if isinstance(made_of, tuple) and made_of:
        head, *rest = made_of
        if isinstance(head, torch.dtype):
            return f"{str(head).removeprefix('torch.')}{list(rest[0])}"
        if head == "mapping":
            return "{" + ", ".join(f"{key}: {_describe(value)}" for key, value in rest) + "}"
        return f"{head}({', '.join(_describe(part) for part in rest)})"
    return str(made_of).removeprefix("torch.")
