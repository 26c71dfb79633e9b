"""``DataLoader``: in a script that knows nothing of ranks, each has its share of every batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import data

from unipar.compat import reading
from unipar.compat.adopting import adoption
from unipar.compat.run import current
from unipar.compat.sharing import SharedLoader
from unipar.errors import ConfigError


class DataLoader(data.DataLoader):
    """torch's. Where the script gives ranks no data of their own, it cuts up training batches."""

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if isinstance(self, SharedLoader) or not self._may_share():
            return super().__iter__()
        whole = self._is_evaluated()
        batches: Any = self.batch_sampler
        fixed = type(batches) is data.BatchSampler and isinstance(
            batches.sampler, data.SequentialSampler
        )
        if whole and fixed:
            # As on all ranks, without a word among them.
            adoption.parts.read(None)
            return super().__iter__()
        made: dict[bool, SharedLoader] = self.__dict__.setdefault("_unipar_shared", {})
        if whole not in made:
            read = adoption.parts.read
            made[whole] = SharedLoader(self, current.world(asked=False), read, whole=whole)
        cut = iter(made[whole])
        if whole:
            return cut
        reading.install(adoption.read)
        adoption.parts.tell_of_parts(current.world(asked=False))
        return _trained_on(cut)

    def _may_share(self) -> bool:
        if adoption.aware or current.placement().size == 1:
            return False
        return self.batch_sampler is not None and not isinstance(self.dataset, data.IterableDataset)

    def _is_evaluated(self) -> bool:
        if not torch.is_grad_enabled():
            return True
        models = adoption.models()
        return bool(models) and not any(one.module.training for one in models)


def _trained_on(batches: Iterator[Any]) -> Iterator[Any]:
    """The batches of a loader.

    Raises:
        ConfigError: none of them was trained on, so what the script has made of them is of a part.
    """
    parts = adoption.parts
    before, drawn, loop = parts.uses, None, object()
    parts.giving += 1
    try:
        for batch in batches:
            with adoption.engine_calls():
                drawn = _random_state()
            adoption.flow.begin(batch, parts.samples, loop)
            if parts.samples == 1 and not adoption.flow.has_seen:
                parts.tell(
                    "each rank has one sample of a batch, so it is not seen whether the script "
                    "compares the samples of a batch with each other, as by x - x.mean(0): if it "
                    "does, results are not those of one process. In a batch of two for each rank "
                    "it is seen."
                )
            yield batch
            adoption.flow.end(loop)
            with adoption.engine_calls():
                random = drawn != _random_state()
            if random and parts.uses > before:
                parts.tell(
                    "random numbers are drawn while a batch is trained on, as by dropout or for "
                    "noise: each rank draws others, for its part of it, so results are those of "
                    "one process only as another seed's are."
                )
    finally:
        parts.giving -= 1
        adoption.flow.leave(loop)
    if parts.uses == before:
        raise ConfigError(
            "a DataLoader was read to its end, and no model was trained meanwhile: each rank has "
            "read its part of the data, so what the script makes of it differs between ranks. Read "
            "it under torch.no_grad(), or call model.eval() before, and every rank reads all."
        )


def _random_state() -> tuple[bytes, ...]:
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if cuda else [])]
    return tuple(one.numpy().tobytes() for one in states)
