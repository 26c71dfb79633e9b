"""A user's own loop: how far it has come in a step, and what it may not do there."""

from __future__ import annotations

import torch

from unipar.engine.absent import LoopCalls
from unipar.errors import ConfigError
from unipar.loss import Loss, LossSum


class OwnLoop:
    """How far a user's own loop has come in the step of an engine.

    Around a pass (``with loop:``) it remembers whether that has failed.

    Attributes:
        whole_step: whether the step is one of ``engine.train_step``, and no loop's.
        by_hand: whether a loop has begun it.
        forwards: forward passes since the last backward pass.
        cleared: whether gradients were cleared since, after one of them.
        told: whether the loop says which micro-batch is the last.
        last: whether it has said so of the one that is being run.
        guessed: whether the last backward pass was only likely to be the last.
        summed: whether gradients were summed in it all the same.
        broken: whether a pass has failed.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Be ready for another step."""
        self.told = self.last = self.guessed = self.summed = False
        self.forwards, self.cleared = 0, False
        self.by_hand = self.whole_step = self.broken = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            # In a whole step the error ends the step.
            self.broken = self.by_hand and not self.whole_step

    def refuse_broken(self, calls: LoopCalls) -> None:
        """Refuse to go on with a step in which a pass has failed."""
        if self.broken:
            raise ConfigError(
                "a forward or backward pass of this step ended with an error, so its gradients are "
                f"in part there and in part not. Call {calls.clear} on every rank, which gives "
                "the step up, and go on with the next batch."
            )

    def check_backward(self, calls: LoopCalls, *, reducing: bool, holds_forwards: bool) -> None:
        """Refuse a backward pass after the last one, or without a forward pass before it.

        Args:
            calls: of the loop.
            reducing: whether gradients are being reduced.
            holds_forwards: whether several forward passes may come before their backward passes.
        """
        if reducing and calls.backward != LoopCalls().backward:
            raise ConfigError(
                f"{calls.backward} came after parameter.grad was used in the same step, for which "
                "its gradients were summed over ranks, and this strategy adds nothing to these. "
                f"Use parameter.grad after the last {calls.backward} of a step, or add the losses "
                "and call it once; or use a strategy that leaves gradients and optimizers whole, "
                "such as ddp."
            )
        if reducing:
            raise ConfigError(
                "engine.backward(loss) came after the one in engine.microbatch(last=True), or "
                "after parameter.grad was used, so the gradients of this step are reduced already. "
                "Pass last=True for the last backward pass before engine.step() alone, or leave "
                "microbatch out: step() then reduces what there is. Use parameter.grad after the "
                "last backward pass of a step."
            )
        if not self.forwards and not holds_forwards:
            raise ConfigError(
                "this backward pass has no forward pass of its own: there was none since the "
                "backward pass before it. Under this strategy each forward pass is followed by its "
                "backward pass, before the next one begins: put both into `with "
                "engine.microbatch(last=…):`, or use strategy='fsdp' or 'ddp', which hold several."
            )

    def check_step(self) -> None:
        """Refuse an optimizer step before the micro-batch that was to be the last."""
        if self.told:
            raise ConfigError(
                "engine.step() came before a backward pass in "
                "engine.microbatch(last=True), which is where gradients are reduced. Pass "
                "last=True for the last backward pass of each step, or leave microbatch "
                "out: step() then reduces what there is."
            )


def parts_of(
    loss: Loss, num_items: float | None
) -> tuple[torch.Tensor, float, torch.Tensor | float]:
    """Take a loss of a user's own loop apart.

    Returns:
        A scalar tensor, what makes a sum over items of it, and the number of items.

    Raises:
        ConfigError: a mean, of nobody knows how many.
    """
    if isinstance(loss, LossSum):
        return loss.total, 1, loss.count
    if num_items is not None:
        return loss, num_items, num_items
    raise ConfigError(
        "engine.backward(loss) needs to know how many items the loss is a mean of, since "
        "micro-batches and ranks may hold different numbers: pass num_items=len(inputs), "
        "or a unipar.LossSum(total, count)."
    )
