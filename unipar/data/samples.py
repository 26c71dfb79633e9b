"""Samples and batches whose errors say where they come from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate

from unipar.data.batch import Batch
from unipar.data.move import pinned
from unipar.data.order import Indices, mixed_seed
from unipar.data.randomness import OwnRandomness
from unipar.errors import DataError


class Samples(Dataset):
    """A map-style dataset that names the rank and the index when a sample raises.

    Where it draws random numbers, as augmentations do, each sample has its own in each epoch: the
    same on any number of ranks and workers, and in a run that goes on. Numbers of generators that
    the dataset has itself are not these.

    Args:
        dataset: the user's.
        rank: for the message.
        seed: of all that is drawn.

    Attributes:
        dataset: the user's.
    """

    def __init__(self, dataset: Any, rank: int, seed: int = 0) -> None:
        self.dataset, self._rank, self._seed = dataset, rank, seed
        self._fetch = getattr(dataset, "__getitems__", None)
        self._calls, self._draws = 0, False

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        epoch = indices.epoch if isinstance(indices, Indices) else 0
        self._calls += 1
        # Whether it draws is looked at in the first calls, and ever more rarely.
        if not self._draws and not self._calls & (self._calls - 1):
            randomness = OwnRandomness(self._seed)
            with randomness:
                samples = self._together(indices)
            if not randomness.drawn:
                return samples
            self._draws = True
        if self._draws:
            return self._one_by_one(indices, epoch)
        return self._together(indices)

    def _together(self, indices: list[int]) -> list[Any]:
        if self._fetch is None:
            return self._one_by_one(indices)
        try:
            return self._fetch(indices)
        except Exception as error:
            # Where one of them raises, the culprit names itself when fetched alone.
            self._one_by_one(indices)
            raise DataError(
                f"rank {self._rank}: __getitems__ of {type(self.dataset).__name__} raised "
                f"{type(error).__name__}: {error}, for samples {indices[:8]}… together, each of "
                "which can be had alone. Mend __getitems__, or remove it."
            ) from error

    def _one_by_one(self, indices: list[int], epoch: int | None = None) -> list[Any]:
        """Samples, each with the random numbers that it has in an epoch, if one is given."""
        dataset, samples, index = self.dataset, [], None
        try:
            for index in indices:
                if epoch is None:
                    samples.append(dataset[index])
                else:
                    with OwnRandomness(mixed_seed("sample", self._seed, epoch, index)):
                        samples.append(dataset[index])
        except Exception as error:
            raise DataError(
                f"rank {self._rank}: sample {index} of {type(dataset).__name__} raised "
                f"{type(error).__name__}: {error}. Mend or leave out that sample."
            ) from error
        return samples


class Pinnable:
    """Collated samples, which a DataLoader pins by their own method.

    Left to itself torch 2.13 makes lists of tuples as it pins, and passes dataclasses over.
    """

    def __init__(self, data: Any) -> None:
        self.data = data

    def pin_memory(self) -> Pinnable:
        return Pinnable(pinned(self.data))


class Collate:
    """A collate function that says which samples do not go together.

    Attributes:
        draws: the random numbers that it has for itself; ``None``: the process's.
    """

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        self._function = function
        self.draws: OwnRandomness | None = None

    @property
    def is_own(self) -> bool:
        """Whether it is a script's, which may draw."""
        return self._function is not default_collate

    def __call__(self, samples: list[Any]) -> Pinnable:
        try:
            with self.draws or contextlib.nullcontext():
                return Pinnable(self._function(samples))
        except DataError:
            raise
        except Exception as error:
            kinds = sorted({_describe(structure(sample, shapes=True)) for sample in samples})
            raise DataError(
                f"{len(samples)} samples do not make a batch ({type(error).__name__}: {error}). "
                f"They are: {'; '.join(kinds[:4])}. Pad them to one shape in the dataset, or "
                "pass a DataLoader with a collate_fn that does."
            ) from error


def as_it_is(batch: Any) -> Any:
    """Collate what comes as a batch already."""
    return batch


def structure(data: Any, *, shapes: bool = False) -> Any:
    """Describe what ``data`` is made of: containers, keys and tensor dtypes, without values."""
    if isinstance(data, torch.Tensor):
        return (data.dtype, tuple(data.shape)) if shapes else data.dtype
    if isinstance(data, (list, tuple)):
        # Lists of plain values (file names, say) may differ in length from batch to batch.
        parts = [structure(item, shapes=shapes) for item in data]
        plain = isinstance(data, list) and all(isinstance(part, str) for part in parts)
        return ("list of", *sorted(set(parts))) if plain else (type(data).__name__, *parts)
    if isinstance(data, Mapping):
        parts = [(str(key), structure(value, shapes=shapes)) for key, value in data.items()]
        return ("mapping", *sorted(parts, key=lambda part: part[0]))
    return type(data).__name__


def same_structure(expected: Any, num_expected: int, found: Any, num_found: int) -> bool:
    """Return whether two batches are made of the same, counting a part for each sample as one.

    A collate function may keep what it cannot stack as a list or tuple with an item for each
    sample (images of different sizes, say), which is longer or shorter with the batch.

    Args:
        expected: the structure of a batch.
        num_expected: how many samples it has.
        found: the structure of another.
        num_found: how many samples that one has.
    """
    if expected == found:
        return True
    if not (isinstance(expected, tuple) and isinstance(found, tuple)) or expected[:1] != found[:1]:
        return False
    head, wanted, given = expected[0], expected[1:], found[1:]
    if head == "list of":
        return False
    if (len(wanted), len(given)) == (num_expected, num_found) and len({*wanted, *given}) == 1:
        return True
    if head == "mapping":
        if [key for key, _ in wanted] != [key for key, _ in given]:
            return False
        wanted, given = [part for _, part in wanted], [part for _, part in given]
    return len(wanted) == len(given) and all(
        same_structure(a, num_expected, b, num_found) for a, b in zip(wanted, given, strict=True)
    )


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
