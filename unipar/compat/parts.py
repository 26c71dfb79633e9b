"""The parts of batches that a rank has, in a script that knows nothing of ranks."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unipar.compat.graph_nodes import couples_inside
from unipar.compat.reductions import (
    Weight,
    is_of_part,
    note_share,
    weight_of,
)
from unipar.engine import share_buffers
from unipar.engine.outputs import tensors_of
from unipar.errors import ConfigError
from unipar.world import World

log = logging.getLogger("unipar")

_FACTOR = "unipar.compat.factor"
Part = tuple[int, int] | None
"""This rank's and all ranks' samples of a batch, with 0 for the latter where each rank has it as a
whole; ``None`` for a whole one of a size that is not known."""


class Parts:
    """The batches that were read, and what losses of parts of them count for.

    Attributes:
        uses: how many passes in training there were, forward and backward.
        giving: how many loops over parts of batches there are now.
    """

    def __init__(self) -> None:
        self.uses = self.giving = 0
        self._read: deque[Part] = deque(maxlen=4)
        self._uneven: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._looked_into: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._told: set[str] = set()
        self._counted = False

    @property
    def cut(self) -> bool:
        """Whether the batch that was read last is a part."""
        return bool(self._read) and self._read[-1] is not None and self._read[-1][1] > 0

    @property
    def any_cut(self) -> bool:
        """Whether one of the batches that were read last is a part."""
        return any(part is not None and part[1] for part in self._read)

    @property
    def samples(self) -> int:
        """How many of the batch that was read last this rank has; 0 where it is a whole one."""
        part = self._read[-1] if self._read else None
        return part[0] if part is not None and part[1] else 0

    def read(self, part: Part) -> None:
        """A batch was read; a whole one is noted once others were not."""
        if self._read or (part is not None and part[1]):
            self._read.append(part)

    def note(self, module: nn.Module, output: Any, inputs: Any) -> None:
        """Note on what a model gives of which part it was computed.

        It is not always the one that was read last: batches are read ahead, and from several
        loaders.
        """
        if not self._read:
            return
        part = self._part_of(inputs)
        found = list(tensors_of(output))
        cut = part is not None and 1 < part[0] < part[1]
        if part is not None and cut and module not in self._looked_into:
            self._looked_into.add(module)
            self._look_into(module, found, part[0])
        for tensor in found:
            note_share(tensor, part)

    def _look_into(self, module: nn.Module, outputs: list[torch.Tensor], samples: int) -> None:
        how = next(filter(None, (couples_inside(one, samples) for one in outputs)), "")
        if how:
            self.tell(
                "%s seems to compare the samples of a batch with each other inside of its forward "
                "(%s over %d of them), and each rank has a part of the batch, so results are not "
                "those of one process. Run on one process, or divide data and gather outputs "
                "yourself, with DistributedDataParallel.",
                type(module).__name__, how, samples,
            )  # fmt: skip

    def tell(self, message: str, *args: Any) -> None:
        """Warn of what is not as on one process, once of each place."""
        said = message % args
        if said not in self._told:
            self._told.add(said)
            log.warning("%s", said)

    def tell_of_parts(self, world: World) -> None:
        """Say what is of a part of a batch alone, and so other than on one process; once."""
        if world.is_main:
            self.tell(
                "this script has no ranks of its own, so each of %d has a part of every training "
                "batch. A loss is read as that of the whole batch; sizes (len(x), x.size(0)) and "
                "what is counted by them, as total += loss.item() * len(x), are of a part.",
                world.data_size,
            )

    def _part_of(self, inputs: Any) -> Part:
        shapes = [one.shape for one in tensors_of(inputs) if one.dim()]
        for sizes in ({shape[0] for shape in shapes}, {one for shape in shapes for one in shape}):
            for part in reversed(self._read):
                if part is not None and part[0] in sizes:
                    return part
        return self._read[-1]

    def weigh(self, loss: torch.Tensor, world: World) -> torch.Tensor:
        """A loss of a part, so that the mean over ranks is that of the whole batch."""
        if not self._read:
            self.tell(
                "no DataLoader of torch's gives this script its batches, so each of %d ranks "
                "trains on all of them: results are those of one process, and no faster.",
                world.data_size,
            )
            return loss
        return self._weighed(loss, self.factor_of(loss, world))

    def whole(self, value: torch.Tensor, world: World) -> torch.Tensor:
        """What a value with a graph, as a loss, is of the whole batch. Collective if of a part.

        Raises:
            ConfigError: the parts do not tell.
            RuntimeError: its graph is gone.
        """
        node: Any = value.grad_fn
        if not self._read or (_FACTOR not in node.metadata and not is_of_part(value)):
            return value.detach()
        return self.summed(value.detach(), self.factor_of(value, world), world)

    def summed(
        self, value: torch.Tensor, factor: torch.Tensor | float, world: World
    ) -> torch.Tensor:
        """What values of ranks' parts are of the whole batch. Collective.

        Args:
            value: of a loss of this rank's part, or of its gradient; without a graph.
            factor: what that loss counts by, as :meth:`factor_of` gives it.
            world: the joined processes.
        """
        found = self._weighed(value, factor).double()
        dist.all_reduce(found)
        return (found / world.size).to(value.dtype)

    @staticmethod
    def _weighed(loss: torch.Tensor, factor: torch.Tensor | float) -> torch.Tensor:
        if isinstance(factor, torch.Tensor):
            # A mean over nothing is no number.
            return torch.where(factor > 0, loss, torch.zeros_like(loss)) * factor.to(loss.dtype)
        return loss if factor == 1 else loss * factor

    def factor_of(self, loss: torch.Tensor, world: World) -> torch.Tensor | float:
        """What a loss counts by; kept on its graph, which tells it before a backward pass alone."""
        node: Any = loss.grad_fn
        if _FACTOR not in node.metadata:
            found = weight_of(loss, world.data_size, self._read[-1])
            if found is None:
                node.metadata[_FACTOR] = 1.0
            else:
                factor = self._by_counts(found, world) if found.counts else found.factor
                # What it is made of may be read after the backward pass, which leaves no graph to
                # tell.
                for one in found.numbers:
                    one.metadata.setdefault(_FACTOR, factor)
                node.metadata[_FACTOR] = factor
        return node.metadata[_FACTOR]

    def _by_counts(self, weight: Weight, world: World) -> torch.Tensor | float:
        if len(weight.counts) == 1 and not weight.plain and (self._counted or not weight.unsure):
            own = weight.counts[0].detach().double() * (weight.samples > 0)
            total = own.clone().to(world.device)
            dist.all_reduce(total)
            return own.to(world.device) * world.size / total.clamp(min=1e-300)
        # What several means count by is alike, or they cannot be weighed as one.
        own = [float(one) * (weight.samples > 0) for one in weight.counts]
        ranks = world.gather((*own, *([weight.samples] if weight.plain else ())))
        columns = list(zip(*ranks, strict=True))
        shares = [[one / (sum(column) or 1) for one in column] for column in columns]
        # The last column of a loss with plain means is of samples.
        self._counted |= any(len(set(one)) > 1 for one in columns[: len(weight.counts)])
        if weight.unsure and not self._counted:
            raise ConfigError(
                "this loss is a sum that is divided by a tensor which is the same on all ranks: "
                "whether it counts what is summed, as the sum of a mask, or is a constant, cannot "
                "be told. Divide by an integer count, as mask.sum() of a boolean mask, or by a "
                "number; or run on one process."
            )
        first, *others = shares
        if any(abs(a - b) > 1e-9 for one in others for a, b in zip(first, one, strict=True)):
            raise ConfigError(
                "this loss adds means over different numbers, as of targets that are not ignored "
                "and of samples, of which ranks have other proportions: what each counts for "
                "cannot be told once they are added. Call backward() on each, with "
                "retain_graph=True on the first, under a strategy that leaves gradients whole; or "
                "run on one process."
            )
        return first[world.rank] * world.size

    def refuse_alone(self) -> None:
        """Refuse a backward pass whose gradients nothing would sum.

        Raises:
            ConfigError: batches are cut up among ranks.
        """
        if self.any_cut:
            raise ConfigError(
                "this loss is of a part of a batch, as each rank has one, and of no module that an "
                "optimizer of torch.optim updates: nothing would sum its gradients over the ranks. "
                "Train an nn.Module that is called as a whole, by such an optimizer: model(x), and "
                "not model.forward(x) or another method; or run on one process."
            )

    # -- batch norms ---------------------------------------------------------------------------

    def even_out(self, module: nn.Module, world: World) -> None:
        """Before an evaluation, give each rank the buffers of rank 0. Collective."""
        if module.training:
            self._uneven.add(module)
        elif module in self._uneven:
            self._uneven.discard(module)
            share_buffers(module, world)


def warn_of_hooks(module: nn.Module) -> None:
    """Say where gradients of a part of a batch alone are looked at, or changed."""
    # torch 2.13, torch/_tensor.py, register_hook.
    if any(one._backward_hooks for one in module.parameters()):
        log.warning(
            "%s has hooks on parameters: they are called with the gradient of each rank's part of "
            "a batch. Where they do more than multiply it, as by clamping, results differ from "
            "those of one process.",
            type(module).__name__,
        )
