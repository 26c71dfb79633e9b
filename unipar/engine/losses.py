"""A loss function on one micro-batch, and what its loss has to be."""

from __future__ import annotations

from torch import nn

from unipar.data.batch import MicroBatch
from unipar.data.feed import on_device
from unipar.engine.divider import PartOf
from unipar.engine.precision import PrecisionPolicy
from unipar.errors import ConfigError
from unipar.loss import Loss, LossFn, LossSum, check_loss
from unipar.objective import Objective
from unipar.world import World


def compute_loss(
    model: nn.Module,
    microbatch: MicroBatch,
    loss_fn: LossFn,
    part_of: PartOf | None,
    *,
    world: World,
    precision: PrecisionPolicy,
    training: bool,
) -> Loss:
    """Run the forward pass of a micro-batch; its loss, in fp32.

    Args:
        model: what the loss function is given.
        microbatch: its data may be on the host still.
        loss_fn: the user's.
        part_of: gives this rank's part of the data; ``None``: that is all of it.
        world: the joined processes.
        precision: surrounds the forward pass.
        training: whether the loss must have a gradient.

    Raises:
        ConfigError: the loss is not one that can be counted.
    """
    if isinstance(loss_fn, Objective):
        own = microbatch.data if part_of is None else part_of(microbatch.data)
        loss_fn = loss_fn.counted(own)
    data = on_device(microbatch, world.device)
    if part_of is not None:
        data = part_of(data)
    if precision.surrounds:
        with precision.forward():
            loss = loss_fn(model, data)
    else:
        loss = loss_fn(model, data)
    check_loss_of_rank(loss, world, training=training)
    if not precision.autocasts:
        return loss
    # Weighting in half precision would round loss and gradient once more on each rank.
    if isinstance(loss, LossSum):
        return LossSum(loss.total.float(), loss.count)
    return loss.float()


def check_loss_of_rank(loss: Loss, world: World, *, training: bool) -> None:
    """Refuse a loss that is no scalar, or a mean where a rank has only a part of its samples.

    Raises:
        ConfigError: it is one of these.
    """
    check_loss(loss, training=training)
    if world.layout.cp > 1 and not isinstance(loss, LossSum):
        raise ConfigError(
            "the loss function returned a mean over samples, and each rank holds a part of "
            "every sequence, so each sample would count once for each part. Return "
            "unipar.LossSum(total, count) over the tokens of this rank's part."
        )
