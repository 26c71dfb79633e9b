"""The reducer: the part of a :class:`StepEngine` that runs backward passes and sums gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from unipar.engine.broadcast import share_buffers
from unipar.engine.trail import Trail
from unipar.world import World


class Reducer:
    """Runs backward passes, and sums over ranks what they leave. This one is alone, and sums none.

    An engine calls, for each step: :meth:`begin`; for each micro-batch a forward pass and
    :meth:`backward`, inside :meth:`microbatch` where there are several; then :meth:`finish` or
    :meth:`discard`; and :meth:`clear`.

    Args:
        module: the user's module, with its parameters in their final form.
        world: the joined processes.
        run_backward: the backward pass itself, for a framework that has its own way.

    Attributes:
        parameters: of the module, frozen ones too: they may be thawed between steps.
        holds_forwards: whether a user's own loop may do several forward passes before their
            backward passes.
        hides_gradients: whether ``parameter.grad`` is kept from a user's own loop between its
            backward passes and ``step()``, since the framework has gradients elsewhere, or would
            not see a change of them.
        watches_gradients: whether a change of ``parameter.grad`` by anything else than a backward
            pass of the engine's can be seen there, and is refused.
        shares_buffers: whether every rank is given rank 0's buffers in each step of a user's own
            loop.
        reopens: whether a backward pass that seemed to be the last may be followed by another,
            after :meth:`reopen`.
        calls_hooks: whether autograd calls hooks on the module's own parameters, with gradients of
            their whole shape.
        trail: what passes came to, where ranks have to come to the same; ``None`` where they need
            not, or are compared otherwise.
    """

    holds_forwards: bool = True
    hides_gradients: bool = False
    watches_gradients: bool = True
    shares_buffers: bool = False
    reopens: bool = False
    calls_hooks: bool = True
    trail: Trail | None = None

    def __init__(
        self,
        module: nn.Module,
        world: World,
        run_backward: Callable[[torch.Tensor], Any] | None = None,
    ) -> None:
        self.module, self.world = module, world
        # Some frameworks put others in their places between a forward and a backward pass.
        self.parameters = list(module.parameters())
        self._run_backward = run_backward

    def begin(self, *, whole_step: bool) -> None:
        """Prepare for the first forward pass of a step. Collective.

        Args:
            whole_step: whether the loop is the engine's own, not the user's.
        """

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        """Surround forward and backward of one of several micro-batches.

        In a user's own loop it is entered only if the loop says which micro-batch is the last;
        :meth:`finish` then sums what there is.
        """
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradients of ``loss`` to those of the step so far.

        Args:
            loss: scalar tensor, scaled by what precision asks for.
            last: whether no other backward pass of this step follows, so that gradients may be
                summed over ranks while they form.

        Raises:
            ConfigError: the framework cannot sum these gradients.
        """
        if self._run_backward is None:
            loss.backward()
        else:
            self._run_backward(loss)

    def finish(self) -> None:
        """Leave in ``.grad`` of what the stepper steps the sum over ranks, each counted once.

        Over whichever ranks hold the parameter: the number of items of the global batch, and no
        number of ranks, has divided what the loss adds. Where a framework can only average, this
        takes its division back.

        Raises:
            ConfigError: some gradient is not summed, and cannot be.
        """

    def reopen(self) -> None:
        """Go on after a backward pass that seemed to be the last. Collective."""
        raise NotImplementedError

    def finish_guessed(self, *, lent: bool) -> None:
        """Finish after a pass that seemed to be the last, and was, where this :attr:`reopens`.

        That pass need not have given a gradient to each parameter.

        Args:
            lent: whether the loop may keep what is in ``parameter.grad``, past the next step.
        """
        self.finish()

    def discard(self) -> None:
        """Throw away what backward passes have left, wherever that is. Collective.

        Called after a step that must not be taken, and before a step that follows one that failed,
        in whichever pass of whichever micro-batch.
        """
        self.clear()

    def clear(self) -> None:
        """Leave no gradient where the next step would add to it; ``parameter.grad`` is ``None``.

        Called after each step, and before the first loss of one (in a user's own loop, before the
        first backward pass), since backward passes of other engines may have gone through this
        model.
        """
        # An optimizer's `zero_grad()` does no more, and takes twenty times as long.
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self.parameters:
                parameter.grad = None

    def forget(self) -> None:
        """Be ready for another step, whatever became of this one. No collective."""

    def probing(self) -> AbstractContextManager[None]:
        """Surround a forward and a backward pass that other ranks may not come to the end of."""
        return self.microbatch(last=False)

    def share_buffers(self, buffers: Iterable[torch.Tensor] | None = None) -> None:
        """Give every rank the buffers of rank 0, before they are evaluated with or saved.

        Args:
            buffers: copies of the module's, where ranks are to keep their own; ``None``: these.
        """
        share_buffers(self.module.buffers() if buffers is None else buffers, self.world)

    def close(self) -> None:
        """Undo what was done to the module."""
