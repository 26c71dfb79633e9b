"""The loss of a step on its way to being a mean over all items of the global batch."""

from __future__ import annotations

import math

import torch

from unipar.world import LossReduction, World


class LossAverage:
    """Adds up the losses of micro-batches and ranks, and their counts of items.

    The count is known beforehand when the loss is a mean over samples. With
    :class:`unipar.LossSum` it is known only after the last micro-batch. No backward pass waits for
    it: losses are divided by :attr:`normalizer`, a power of two near it, which rounds nothing, and
    gradients once by the rest before they are clipped.

    Attributes:
        world: the ranks.
        begun: whether a loss was added in this step.
        keeps_scale: whether :attr:`normalizer` is 1: backward passes are then those of the losses
            as they are given, which counts where these passes are not linear.
        alike: whether every rank has given :meth:`start` the same; known after :meth:`finish`.
        normalizer: what the losses of this step are divided by for their backward passes.
        items_per_sample: the most that were seen; kept in checkpoints, for in fp16 it decides what
            overflows.
    """

    def __init__(self, world: World) -> None:
        self.world, self.alike = world, True
        self.keeps_scale = False
        self.items_per_sample = 1.0
        self.clear()

    def clear(self) -> None:
        """Be ready for another step."""
        self.begun = self._unlike = False
        self._total: torch.Tensor | None = None
        self._factor: float = 1.0
        self._count: torch.Tensor | float = 0
        self._num_samples = 1
        self._reduction: LossReduction | None = None
        self.normalizer = 0.0

    @property
    def reducing(self) -> bool:
        """Whether :meth:`start` was called in this step."""
        return self._reduction is not None

    def begin(self, num_samples: int, num_items: float | None = None) -> None:
        """Begin a step.

        Args:
            num_samples: samples of the global batch.
            num_items: items of the global batch, if known beforehand.
        """
        self._num_samples = num_samples
        self.normalizer = self._expected_items() if num_items is None else float(num_items)

    def _expected_items(self) -> float:
        """The power of two nearest to the most items that the global batch should have.

        The same on every rank and in a resumed run, and known without asking another rank. Where it
        is much too low, as in a run's first step if a sample has many items, fp16 may overflow,
        which skips the step. A batch with fewer items than others does not lower it.
        """
        if self.keeps_scale:
            return 1.0
        expected = self.items_per_sample * self._num_samples
        return 2.0 ** round(math.log2(expected))

    def add(self, loss: torch.Tensor, weight: float, count: torch.Tensor | float) -> None:
        """Add ``weight * loss``, a sum over ``count`` items.

        Args:
            loss: scalar tensor without gradient.
            weight: what makes a sum over this micro-batch's items of it.
            count: how many items those are.
        """
        if self._total is None:
            self.begun, self._total, self._factor = True, loss, weight
        else:
            self._total = self._total * self._factor + loss * weight
            self._factor = 1.0
        self._count = self._count + count

    def start(self, fingerprint: int = 0) -> None:
        """Begin to sum over ranks; nothing is added after it. Collective.

        Args:
            fingerprint: as for :meth:`World.start_reduce_loss`.
        """
        assert self._total is not None
        self._reduction = self.world.start_reduce_loss(
            self._total, self._count, self._factor, fingerprint
        )

    def reopen(self) -> None:
        """Let more be added after :meth:`start`, which is called once more then. Collective."""
        assert self._reduction is not None
        if self.world.size > 1:
            self._reduction.wait()
            self._unlike |= not self._reduction.alike
            self.world.reopen_step()
        self._reduction = None

    def finish(self) -> tuple[float, float, float]:
        """The loss of the step, its number of items, and what gradients are still to be divided by.

        Waits for the other ranks.
        """
        assert self._reduction is not None
        loss, count = self._reduction.wait()
        self.alike = self._reduction.alike and not self._unlike
        self.items_per_sample = max(self.items_per_sample, count / self._num_samples)
        return loss, count, count / self.normalizer

    def local(self) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Return what this rank has added: the sum, and how many items it is over."""
        assert self._total is not None
        return self._total * self._factor, self._count
