"""The parts of batches that a rank has, in a script that knows nothing of ranks."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from typing import Any

import torch
from torch import nn

from unipar.compat.reductions import factor_of, note_share
from unipar.engine import share_buffers
from unipar.engine.outputs import tensors_of
from unipar.errors import ConfigError
from unipar.world import World

log = logging.getLogger("unipar")

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
Part = tuple[int, int] | None
"""This rank's and all ranks' samples of a batch, with 0 for the latter where each rank has it as a
whole; ``None`` for a whole one of a size that is not known."""


class Parts:
    """The batches that were read, and what losses of parts of them count for.

    Attributes:
        uses: how many passes in training there were, forward and backward.
    """

    def __init__(self) -> None:
        self.uses = 0
        self._read: deque[Part] = deque(maxlen=4)
        self._uneven: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._told = False

    def read(self, part: Part) -> None:
        """A batch was read; a whole one is noted once others were not."""
        if self._read or (part is not None and part[1]):
            self._read.append(part)

    def note(self, output: Any, inputs: Any) -> None:
        """Note on what a model gives of which part it was computed.

        It is not always the one that was read last: batches are read ahead, and from several
        loaders.
        """
        if not self._read:
            return
        part = self._part_of(inputs)
        for tensor in tensors_of(output):
            note_share(tensor, part)

    def _part_of(self, inputs: Any) -> Part:
        shapes = [one.shape for one in tensors_of(inputs) if one.dim()]
        for sizes in ({shape[0] for shape in shapes}, {one for shape in shapes for one in shape}):
            for part in reversed(self._read):
                if part is not None and part[0] in sizes:
                    return part
        return self._read[-1]

    def weigh(self, loss: torch.Tensor, ranks: int) -> torch.Tensor:
        """A loss of a part, so that the mean over ranks is that of the whole batch."""
        if not self._read:
            if not self._told:
                log.warning(
                    "no DataLoader of torch's gives this script its batches, so each of %d ranks "
                    "trains on all of them: results are those of one process, and no faster.",
                    ranks,
                )
                self._told = True
            return loss
        factor = factor_of(loss, ranks, self._read[-1])
        return loss if factor == 1 else loss * factor

    def refuse_alone(self) -> None:
        """Refuse a backward pass whose gradients nothing would sum.

        Raises:
            ConfigError: batches are cut up among ranks.
        """
        if any(part is not None and part[1] for part in self._read):
            raise ConfigError(
                "this loss is of a part of a batch, as each rank has one, and of no module that an "
                "optimizer of torch.optim updates: nothing would sum its gradients over the ranks. "
                "Train an nn.Module that is called as a whole, by such an optimizer; or run on one "
                "process."
            )

    # -- batch norms ---------------------------------------------------------------------------

    def even_out(self, module: nn.Module, world: World) -> None:
        """Before an evaluation, give each rank the buffers of rank 0. Collective."""
        if module.training:
            self._uneven.add(module)
        elif module in self._uneven:
            self._uneven.discard(module)
            share_buffers(module, world)


def warn_of_parts(module: nn.Module) -> None:
    """Say what of a module sees a part of a batch alone, and so does other than on one process."""
    name = type(module).__name__
    if any(isinstance(one, _BATCH_NORMS) and one.training for one in module.modules()):
        log.warning(
            "%s has batch norms: in training each rank normalizes by its part of a batch, so "
            "losses differ from those of one process. On GPUs strategy ddp has sync_batchnorm.",
            name,
        )
    # torch 2.13, torch/_tensor.py, register_hook.
    if any(one._backward_hooks for one in module.parameters()):
        log.warning(
            "%s has hooks on parameters: they are called with the gradient of each rank's part of "
            "a batch. Where they do more than multiply it, as by clamping, results differ from "
            "those of one process.",
            name,
        )
