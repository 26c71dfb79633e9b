"""Whether a loss depends on how a batch is divided: a micro-batch held against its halves.

A mean over unmasked tokens of what a rank happens to have is not a part of the mean over the
batch's, and samples that a contrastive loss compares are others in each micro-batch. Nothing else
shows it: each part alone is a sound loss.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import nn

from unipar.data.batch import MicroBatch
from unipar.data.picked import picked
from unipar.engine.reach import Reach
from unipar.engine.trials import torch_generators, trial
from unipar.loss import Loss, LossFn, LossSum
from unipar.world import World

log = logging.getLogger("unipar")

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_ROUNDING = 1e-6
"""What a loss that is small beside its items may be off by."""


def warn_of_parts(
    module: nn.Module,
    microbatch: MicroBatch,
    loss_fn: LossFn,
    compute: Callable[[MicroBatch], Loss],
    world: World,
    *,
    num_parts: int,
    exact: bool,
) -> None:
    """Warn of a loss that is another where a batch is divided otherwise. Collective.

    The loss function is called three times without gradients and without dropout, and what it and
    the model can reach is put back. Batch norms use their running statistics, for of theirs another
    warning tells. Nothing is said where calls cannot be undone, random numbers are drawn, a batch
    cannot be cut, or a half of one cannot be computed.

    Args:
        module: the model, in training.
        microbatch: the first of a step.
        loss_fn: the user's.
        compute: forward pass and loss.
        world: the joined processes.
        num_parts: into how many a global batch is divided.
        exact: whether the model computes in fp32.
    """
    reach = Reach(module, loss_fn)
    pieces = _pieces(microbatch) if reach.repeatable else []
    # A rank alone would wait where forward passes are collective.
    if not all(world.gather(len(pieces) > 0)):
        return
    losses: list[tuple[float, float]] = []
    rounding = 0.0
    printed = io.StringIO()
    with contextlib.suppress(Exception), _eagerly(), contextlib.redirect_stdout(printed):
        for piece in pieces:
            loss = _compute(module, piece, compute, reach, world)
            total = loss.total if isinstance(loss, LossSum) else loss
            rounding = max(rounding, torch.finfo(total.dtype).eps)
            losses.append(_terms(loss, piece))
    # Close, for the losses of an untrained language model's tokens are all about the same.
    problem = _difference(losses, max(5e-6 if exact else 1e-3, 2 * rounding))
    found = [said for said in world.gather(problem) if said]
    if found and world.rank == 0:
        log.warning(
            f"the loss depends on how a batch is divided, and here it is divided into {num_parts} "
            f"parts: {found[0]}. So it is not that of one process. If it is a mean over what "
            "samples have unequally many of (tokens, pixels), return unipar.LossSum(sum, number "
            "of them). If it compares samples (contrastive losses, statistics of the batch), it "
            "compares those of one part; one process with micro_batch_size as large as "
            "global_batch_size compares all."
        )


def _pieces(microbatch: MicroBatch) -> list[MicroBatch]:
    """The micro-batch and its halves; none, if it cannot be cut."""
    samples = microbatch.num_samples
    if samples < 2:
        return []
    pieces = []
    half = samples // 2
    try:
        # All are copies: the loss function may change what it is given.
        for places in (range(samples), range(half), range(half, samples)):
            data = picked(microbatch.data, samples, places)
            pieces.append(replace(microbatch, data=data, num_samples=len(places), copy=None))
    except (ValueError, TypeError):
        return []
    return pieces


def _compute(
    module: nn.Module,
    piece: MicroBatch,
    compute: Callable[[MicroBatch], Loss],
    reach: Reach,
    world: World,
) -> Loss:
    """The loss of a piece; not a number where it draws random numbers."""
    before = torch_generators(world.device)
    try:
        with trial(module, world.device) as draws, torch.no_grad(), reach.watching():
            for one in module.modules():
                if isinstance(one, _BATCH_NORMS):
                    one.training = False
            loss = compute(piece)
            drawn = not all(map(torch.equal, before, torch_generators(world.device)))
    finally:
        reach.put_back()
    return torch.tensor(math.nan) if drawn or draws.on_host else loss


def _terms(loss: Loss, piece: MicroBatch) -> tuple[float, float]:
    """The loss, summed over its items, and their number."""
    if isinstance(loss, LossSum):
        return float(loss.total), float(loss.count)
    return float(loss) * piece.num_samples, float(piece.num_samples)


def _difference(losses: Sequence[tuple[float, float]], tolerance: float) -> str:
    """Say how the halves' loss differs; nothing, if it does not, or that is not known."""
    if len(losses) < 3 or not all(count for _, count in losses):
        return ""
    means = [total / count for total, count in losses]
    of_halves = (losses[1][0] + losses[2][0]) / (losses[1][1] + losses[2][1])
    # What is no number is not larger.
    if abs(of_halves - means[0]) > tolerance * max(map(abs, means)) + _ROUNDING:
        return f"one micro-batch's is {means[0]:.6g}, and its halves' is {of_halves:.6g}"
    return ""


def _eagerly() -> AbstractContextManager[object]:
    """Compile nothing for shapes that do not come again."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")
