"""Finding the largest micro-batch that fits in memory."""

from __future__ import annotations

import functools
import logging

import torch

from unipar.data import Loader, move_to
from unipar.data.batch import MicroBatch
from unipar.errors import ConfigError
from unipar.loss import LossFn
from unipar.strategy import Engine
from unipar.train.probing import fits_on_all
from unipar.world import World

log = logging.getLogger("unipar")


def largest_micro_batch(engine: Engine, loader: Loader, loss_fn: LossFn, world: World) -> Loader:
    """Try the rank's whole share of a global batch, then halves of it, until all ranks manage.

    Args:
        engine: its gradients must be empty.
        loader: whose first batch is tried; its position stays.
        loss_fn: as in training.
        world: the joined processes.

    Returns:
        The loader with the micro-batch size that fits.

    Raises:
        ConfigError: not even one sample fits; or a size does not on some rank, and the others
            cannot try a smaller one with it.
    """
    size = loader.micro_batch_size
    while True:
        candidate = loader.with_micro_batch_size(size)
        microbatch = candidate.peek().microbatches[0]
        attempt = functools.partial(_fits, engine, microbatch, loss_fn, world, size)
        if fits_on_all(world, attempt, size):
            log.info("micro_batch_size='auto': %d fits", size)
            return candidate
        if size == 1:
            raise ConfigError(
                "micro_batch_size='auto': not even one sample a forward pass fits in memory. "
                "Shard the model (strategy='fsdp'), recompute activations "
                "(activation_checkpointing='full'), keep them on the host "
                "(activation_offload=True), or use precision='bf16'."
            )
        size //= 2


def _fits(engine: Engine, microbatch: MicroBatch, loss_fn: LossFn, world: World, size: int) -> bool:
    try:
        # As in the run, where the next micro-batch is on its way by then.
        beside = move_to(microbatch.data, world.device)
        engine.probe(microbatch, loss_fn)
        del beside
    except (torch.OutOfMemoryError, MemoryError):
        fits = False
    except ConfigError as error:
        if not isinstance(error.__context__, torch.OutOfMemoryError):
            raise
        fewer = f"Set micro_batch_size to a number that fits ({size // 2}, say)."
        if size == 1:
            fewer = "Use a smaller or a divided model."
        raise ConfigError(
            f"micro_batch_size='auto': rank {world.rank} ran out of memory trying {size}, and "
            f"cannot try fewer after that ({error}) {fewer}"
        ) from error
    except RuntimeError as error:
        # The CPU allocator has no exception type of its own.
        if "can't allocate memory" not in str(error):
            raise
        fits = False
    else:
        fits = True
    if not fits and torch.cuda.is_available():
        torch.cuda.empty_cache()
    return fits
