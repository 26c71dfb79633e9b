"""Users' data, as one dataset and the settings that came with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from unipar.errors import DataError


@dataclass(frozen=True)
class Source:
    """A dataset, and how it is to be loaded.

    Attributes:
        dataset: map-style, or an ``IterableDataset``.
        collate_fn: makes a batch of a list of samples.
        shuffle: whether the data came with an order of its own (``None``: it did not say).
        drop_last: whether a ragged last global batch is left out.
        settings: further keyword arguments of ``DataLoader``.
    """

    dataset: Any
    collate_fn: Callable[[list[Any]], Any] = default_collate
    shuffle: bool | None = None
    drop_last: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def is_stream(self) -> bool:
        return isinstance(self.dataset, IterableDataset)

    @property
    def in_memory(self) -> bool:
        """Whether samples are tensors or in a list, and no code of the user's makes batches."""
        dataset: Any = self.dataset
        while type(dataset) is Subset:
            dataset = dataset.dataset
        there = type(dataset) in (torch.Tensor, TensorDataset, list)
        return there and self.collate_fn is default_collate

    @cached_property
    def num_samples(self) -> int | None:
        """Samples of an epoch; ``None`` for a stream that does not know."""
        if not hasattr(self.dataset, "__len__"):
            return None
        try:
            return len(self.dataset)
        except Exception as error:
            # A chain of streams has a length only if each of them has.
            if self.is_stream and isinstance(error, (TypeError, NotImplementedError)):
                return None
            raise DataError(
                f"len() of {type(self.dataset).__name__} fails: {type(error).__name__}: {error}. "
                "It must be the number of samples, an integer from 0."
            ) from error


def open_source(data: Any) -> Source:
    """Understand ``data``.

    A ``DataLoader`` keeps its dataset, collate function, workers and pinning; its order and batch
    size give way to the global ones. A tensor holds samples along its first dim. A tuple is always
    columns of samples, and a list always samples, whatever is in it.

    Raises:
        DataError: it is no data, or a ``DataLoader`` whose sampler cannot be kept.
    """
    if isinstance(data, DataLoader):
        return _from_loader(data)
    if isinstance(data, torch.Tensor):
        if not data.dim():
            raise DataError(
                "the data is a tensor without dims, a single number. A tensor holds samples along "
                "its first dim."
            )
        return Source(data)
    if isinstance(data, tuple):
        others = sorted({type(t).__name__ for t in data if not isinstance(t, torch.Tensor)})
        if others or not data:
            raise DataError(
                f"a tuple holds columns, each a tensor, and this one holds {others or 'nothing'}. "
                "Make tensors of them (torch.as_tensor), or pass a list whose items are samples."
            )
        lengths = [len(t) if t.dim() else 0 for t in data]
        if len(set(lengths)) > 1:
            raise DataError(
                f"a tuple of tensors holds columns of equal length, and these have {lengths}. "
                "Pass tensors with equal first dims, or a list whose items are the samples."
            )
        return Source(TensorDataset(*data))
    if isinstance(data, (str, bytes)):
        raise DataError(
            f"the data is the text {data[:60]!r}, and a dataset is wanted. Read the file, or "
            "import the object, that it names, and pass that."
        )
    if isinstance(data, Mapping):
        raise DataError(
            "the data is a mapping, which has no samples by index. Pass a tuple of tensors for "
            "columns, a list of dicts, or a dataset whose items are dicts."
        )
    if isinstance(data, IterableDataset) or (
        hasattr(data, "__getitem__") and hasattr(data, "__len__")
    ):
        return Source(data)
    raise DataError(
        f"the data is a {type(data).__name__}, which is none of: a dataset with __getitem__ and "
        "__len__, a torch IterableDataset, a DataLoader, a tensor, a tuple of tensors, or a list "
        "of samples. Wrap it in a torch.utils.data.IterableDataset if it can only be iterated."
    )


def batch_size_of(data: Any) -> int | None:
    """The batch size that a ``DataLoader`` was made with; ``None`` for anything else.

    Raises:
        DataError: the ``DataLoader`` cannot be used, which says why it has no batch size.
    """
    if not isinstance(data, DataLoader):
        return None
    open_source(data)
    return data.batch_size


def num_samples_of(data: Any) -> int | None:
    """Samples in the data; ``None`` for a stream that does not know."""
    return open_source(data).num_samples


def in_words(data: Any) -> str:
    """Describe the kind of data, how much there is, and in which order it comes."""
    source = open_source(data)
    kind = "a stream" if source.is_stream else "a dataset"
    length = "" if source.num_samples is None else f" of {source.num_samples} samples"
    order = {None: "", True: ", shuffled", False: ", in order"}[source.shuffle]
    return f"{kind}{length}{order}{', drop_last' if source.drop_last else ''}"


def _from_loader(loader: DataLoader) -> Source:
    stream = isinstance(loader.dataset, IterableDataset)
    if not stream:
        _ = Source(loader.dataset).num_samples  # What follows would fail with its len().
        _check_sampler(loader)
    elif loader.batch_size is None:
        raise DataError(
            "the DataLoader has batch_size=None, so its stream makes its own batches, and how many "
            "samples a batch has must not depend on the devices. Pass a stream of single samples, "
            "in a DataLoader with batch_size and collate_fn if it needs one."
        )
    shuffle = None if stream else isinstance(loader.sampler, RandomSampler)
    settings = worker_settings(loader)
    return Source(loader.dataset, loader.collate_fn, shuffle, bool(loader.drop_last), settings)


def worker_settings(loader: DataLoader) -> dict[str, Any]:
    """Return the settings that a loader was built with for the processes that read its samples."""
    settings: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
    }
    if loader.num_workers:
        settings["prefetch_factor"] = loader.prefetch_factor
        settings["persistent_workers"] = loader.persistent_workers
    return settings


def _check_sampler(loader: DataLoader) -> None:
    if isinstance(loader.sampler, DistributedSampler):
        raise DataError(
            "the DataLoader has a DistributedSampler, and unipar divides the data among ranks "
            "itself. Leave the sampler out: pass the dataset, or a DataLoader with shuffle=True."
        )
    name = None
    if loader.batch_sampler is None:
        name = "batch_size=None"
    elif type(loader.batch_sampler) is not BatchSampler:
        name = f"batch_sampler={type(loader.batch_sampler).__name__}"
    elif type(loader.sampler) not in (RandomSampler, SequentialSampler):
        name = f"sampler={type(loader.sampler).__name__}"
    elif isinstance(loader.sampler, RandomSampler) and (
        loader.sampler.replacement or loader.sampler.num_samples != len(loader.sampler.data_source)
    ):
        name = "RandomSampler with replacement or num_samples"
    elif len(loader.sampler) != len(loader.dataset):  # pyright: ignore[reportArgumentType]
        name = f"sampler={type(loader.sampler).__name__} over a part of the dataset"
    if name is not None:
        raise DataError(
            f"the DataLoader has {name}, which would decide the order of samples, and the order "
            "must not depend on the devices. Pass the dataset, and express the choice in it: "
            "torch.utils.data.Subset(dataset, indices) takes some samples, in that order with "
            "shuffle=False, and repeats those whose index is repeated (as a weighted sampler does)."
        )
