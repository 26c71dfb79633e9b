"""Checks of data and batch sizes before any sample is read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch

from unipar.data.order import Position, Slicing, apportioned
from unipar.data.sources import Source
from unipar.errors import CheckpointError, ConfigError, DataError


def slicing_of(
    size: int, micro: int | None, rank: int, ranks: int, shares: Sequence[float] | None = None
) -> Slicing:
    """The slicing of these sizes; left out, ``micro`` is the whole share, or the largest one."""
    if size < 1:
        raise ConfigError(f"global_batch_size={size}: ask for at least 1 sample a step.")
    slicing = Slicing(size, 1, rank, ranks, _whole_numbers(shares, size, ranks))
    share = slicing.largest_share(size)
    if micro is None:
        micro = share
    if not 1 <= micro <= share:
        leaves = f"leaves each {share}" if slicing.shares is None else f"leaves at most {share}"
        raise ConfigError(
            f"micro_batch_size={micro} does not fit: a global batch of {size} over {ranks} "
            f"device(s) {leaves}. Use 1 to {share}, or a larger global_batch_size."
        )
    return dataclasses.replace(slicing, micro_batch_size=micro)


def check_shares(shares: Any) -> tuple[float, ...]:
    """Return ``shares`` if they are positive numbers; how many there must be is not looked at."""
    if (
        isinstance(shares, Sequence)
        and shares
        and all(_positive(share) and not isinstance(share, bool) for share in shares)
    ):
        return tuple(shares)
    if shares == "auto":
        raise ConfigError(
            "shares='auto' measures how fast ranks are in the training loop of unipar.fit, which "
            "alone can change them. Give a loader of your own numbers, such as shares=[2, 1]."
        )
    raise ConfigError(
        f"shares={shares!r:.80}: give a list of positive, finite numbers, one for each "
        "data-parallel rank, such as [2, 1] for two of which the first takes two thirds of each "
        "global batch; leave it out for equal shares, or have unipar.fit measure them by "
        "shares='auto'."
    )


def _positive(number: Any) -> bool:
    return isinstance(number, (int, float)) and 0 < number < math.inf


def _whole_numbers(shares: Sequence[float] | None, size: int, ranks: int) -> tuple[int, ...] | None:
    """Shares in exact proportion, so that every machine divides alike; ``None`` if all are equal.

    Raises:
        ConfigError: there are not as many as ranks, or one is too small for a sample.
    """
    if shares is None:
        return None
    shares = check_shares(shares)
    said = f"shares=[{', '.join(f'{share:g}' for share in shares)}]"
    if len(shares) != ranks:
        example = [2, *[1] * (ranks - 1)] if ranks > 1 else [1]
        raise ConfigError(
            f"{said} are {len(shares)} number(s), and a global batch is divided among {ranks} "
            "data-parallel rank(s) (processes that hold parts of one replica, by tp, pp or cp, "
            f"count as one). Give {ranks}, such as shares={example}."
        )
    # As they are written: 0.1 is a tenth.
    exact = [Fraction(str(share)) for share in shares]
    if len(set(exact)) == 1:
        return None
    common = math.lcm(*(share.denominator for share in exact))
    whole = tuple(int(share * common) for share in exact)
    parts = apportioned(size, whole)
    if 0 in parts:
        empty = ", ".join(str(rank) for rank, part in enumerate(parts) if not part)
        enough = math.ceil(Fraction(sum(whole), min(whole)))
        raise ConfigError(
            f"{said} leave data-parallel rank {empty} none of the {size} sample(s) of a global "
            f"batch. Set global_batch_size to {enough} or more, or give numbers that are nearer to "
            "each other."
        )
    return whole


def shuffles(shuffle: bool | None, source: Source) -> bool:
    """Return whether each epoch has an order of its own: as asked, or as the data came, or yes."""
    if source.is_stream:
        if shuffle:
            raise ConfigError(
                "shuffle=True needs a dataset with indices, and this is a stream, which has the "
                "order in which it comes. Shuffle inside the stream (a buffer), and leave it out."
            )
        return False
    if shuffle is not None:
        return shuffle
    return True if source.shuffle is None else source.shuffle


def check_size(num_samples: int, global_batch_size: int, source: Source) -> None:
    """Refuse data that is empty or smaller than a global batch."""
    if num_samples == 0:
        raise DataError(
            f"the data ({type(source.dataset).__name__}) is empty: it has 0 samples. "
            "Look at the path or filter that it was made with."
        )
    if num_samples < global_batch_size:
        hint = ""
        if isinstance(source.dataset, list) and all(
            isinstance(item, torch.Tensor) for item in source.dataset
        ):
            hint = " A list holds samples: for columns such as inputs and targets, pass a tuple."
        raise DataError(
            f"the data has {num_samples} samples, fewer than one global batch of "
            f"{global_batch_size}. Lower global_batch_size to at most {num_samples}.{hint}"
        )


def saved_position(state: Mapping[str, Any]) -> Position:
    """The position in what :meth:`unipar.data.Loader.state_dict` gave.

    Raises:
        CheckpointError: something is missing in it, or is no count.
    """
    for key in ("epoch", "index"):
        if key not in state:
            raise CheckpointError(f"the saved position in the data has no '{key}'.")
    for key, least in (("epoch", 0), ("index", 0), ("num_samples", 0), ("global_batch_size", 1)):
        value = state.get(key, least)
        may_be_none = key == "num_samples"
        if not (type(value) is int and least <= value < 2**53) and not (
            may_be_none and value is None
        ):
            raise CheckpointError(
                f"the saved position in the data has {key}={str(value)[:60]}, which is no count."
            )
    return Position(state["epoch"], state["index"])


def order_differences(
    stored: Mapping[str, Any], own: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    """Return what would change the order of data: (name, as it was stored, as it is now).

    Args:
        stored: as :attr:`unipar.data.Loader.order` was; what it lacks, or does not know (the length
            of a stream), differs in nothing.
        own: as it is now.
    """
    return [
        (name, stored[name], value)
        for name, value in own.items()
        if value is not None and stored.get(name) is not None and stored[name] != value
    ]


def check_same_epoch(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse a position within an epoch that had another order, other batches or other data."""
    index = state["index"]
    for name, was, now in order_differences(state, own):
        if name == "num_samples":
            raise DataError(
                f"the saved position is batch {index} of an epoch over {was} samples, and this "
                f"data has {now}: that would be other samples. Give the same data, or "
                "start a new run from the saved weights (unipar.load_model)."
            )
        epoch = (
            f"in global batches of {was}" if name == "global_batch_size" else f"with {name}={was}"
        )
        raise ConfigError(
            f"the saved position is batch {index} of an epoch {epoch}, and now {name}={now}: "
            f"that would be other samples. Set {name}={was}."
        )


def no_batch(source: Source, epoch: int, global_batch_size: int) -> str:
    """Why a stream may have given no batch in an epoch."""
    name = type(source.dataset).__name__
    if epoch:
        return (
            f"the stream ({name}) gave no sample in epoch {epoch}: it was used up before. Its "
            "__iter__ must begin again each time it is called."
        )
    if source.drop_last:
        return (
            f"the stream ({name}) gave no full global batch of {global_batch_size}, and the "
            "DataLoader has drop_last=True. Lower global_batch_size, or leave drop_last out."
        )
    return f"the stream ({name}) is empty: iterating it gave no sample at all."
