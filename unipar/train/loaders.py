"""The loaders of a run, from its config and its data."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from unipar.config import RunFields
from unipar.data import Loader, batch_size_of, num_samples_of
from unipar.errors import ConfigError

log = logging.getLogger("unipar")


def training_loader(
    config: RunFields,
    data: Any,
    *,
    data_rank: int = 0,
    data_size: int = 1,
    pin_memory: bool | None = None,
) -> Loader:
    """A rank's share of the training data, in the global order.

    With ``micro_batch_size="auto"`` a micro-batch is the rank's whole share until it is known.
    ``shares`` of the config are what ranks take of a global batch in proportion to; with ``"auto"``
    they are equal until speeds are known.

    Args:
        config: of the run.
        data: what to train on.
        data_rank: which share.
        data_size: number of shares.
        pin_memory: whether batches go to page-locked memory; left out: as the data says.

    Raises:
        ConfigError: neither the config nor the data says how large a global batch is, or it cannot
            be divided as the config says.
        DataError: the data cannot be trained on.
    """
    size = config.global_batch_size or batch_size_of(data)
    if size is None:
        raise ConfigError(
            "global_batch_size is not set, and the data has no batch size of its own. "
            "Set global_batch_size, the samples of one step over all devices."
        )
    micro = config.micro_batch_size
    return Loader(
        data,
        global_batch_size=size,
        micro_batch_size=None if micro == "auto" else micro,
        data_rank=data_rank,
        data_size=data_size,
        shares=None if config.shares == "auto" else config.shares,
        seed=config.seed,
        shuffle=config.shuffle,
        num_workers=config.num_workers,
        pin_memory=pin_memory,
    )


def say_lone_samples(model: nn.Module, loader: Loader) -> None:
    """Say that BatchNorm will see single samples, where nobody has asked for that.

    Micro-batches are as many on every rank, so that a rank with a small share may have one sample
    in some of them, or one that counts nothing.
    """
    kinds = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
    if loader.micro_batch_size == 1 or not any(
        isinstance(one, kinds) and one.training for one in model.modules()
    ):
        return
    last = loader.last_batch_size
    sizes = {loader.global_batch_size: "a global batch"}
    if last is not None:
        sizes[last] = "an epoch's last batch"
    for size, of in sizes.items():
        fewest, parts = min(loader.shares_of(size)), loader.num_microbatches(size)
        if fewest < 2 * parts:
            log.warning(
                "BatchNorm gets single samples to learn from: a rank has %d of the %d samples of "
                "%s, in %d micro-batch%s. %s",
                fewest, size, of, parts, "es" * (parts > 1),
                "Leave it out: give a DataLoader with drop_last=True." if size == last else
                "Raise global_batch_size or micro_batch_size, or give shares that are nearer to "
                "each other.",
            )  # fmt: skip
            return


def say_evaluating(model: nn.Module) -> None:
    """Say that a model comes in evaluation mode, in which it stays."""
    if not model.training:
        log.warning(
            "%s is in evaluation mode, as from_pretrained() and eval() leave it, and is trained "
            "so: nothing is dropped, and batch norms learn no statistics. Call model.train() "
            "before; parts that are to stay as they are may be left in evaluation mode.",
            type(model).__name__,
        )


def evaluation_loader(
    config: RunFields,
    data: Any,
    micro_batch_size: int,
    *,
    data_rank: int = 0,
    data_size: int = 1,
    pin_memory: bool | None = None,
) -> Loader | None:
    """A rank's share of the evaluation data, in the order of the data; all shares are equal.

    Args:
        config: of the run.
        data: what to evaluate on; ``None`` gives no loader.
        micro_batch_size: samples that a rank can take in one forward pass.
        data_rank: which share.
        data_size: number of shares.
        pin_memory: whether batches go to page-locked memory; left out: as the data says.

    Raises:
        DataError: there is data, and it is empty or cannot be used.
    """
    if data is None:
        return None
    size = batch_size_of(data) or micro_batch_size * data_size
    samples = num_samples_of(data)
    return Loader(
        data,
        global_batch_size=size if samples is None else max(1, min(size, samples)),
        data_rank=data_rank,
        data_size=data_size,
        shuffle=False,
        num_workers=config.num_workers,
        pin_memory=pin_memory,
    )
