"""Optimizers that average what is in ``p.grad`` over ranks when Horovod's do.

Horovod has a hook on each parameter that its optimizer updates. After so many backward passes it
averages what is in ``p.grad``, whoever has put it there; ``synchronize()`` averages it again, and
so does ``step()``, but within ``skip_synchronize()``. Until then it is each rank's own (Horovod
0.28.1, torch/optimizer.py).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from unipar.compat.adopted import AdoptedOptimizer
from unipar.compat.optimizers import zero_unused
from unipar.engine import StepEngine, scale_gradients
from unipar.errors import ConfigError, first_few
from unipar.loss import LossSum

log = logging.getLogger("unipar")
_AGAIN = (
    "optimizer.step() called without optimizer.skip_synchronize() context after "
    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code."
)
"""Horovod's own words."""


class Delay:
    """When the gradients of an optimizer are averaged.

    Args:
        passes: after how many backward passes.
        trained: which parameters have a hook, by groups.

    Attributes:
        synchronizes: whether a step averages them, too.
        synchronized: whether ``synchronize()`` was called since the last step.
        zeroes: whether what has no gradient as the optimizer steps is to have zeros.
    """

    def __init__(self, passes: int, trained: Sequence[Sequence[bool]]) -> None:
        self._trained = trained
        self.synchronizes = self.zeroes = True
        self.begin(passes)

    def begin(self, passes: int | None = None) -> None:
        """Count passes anew."""
        self._passes = self._passes if passes is None else passes
        self.synchronized = False
        self.restart()

    def restart(self) -> None:
        """Gradients are averaged: count passes from now on."""
        self._left = self._passes

    def note_pass(self) -> bool:
        """Note a backward pass; whether what there is after it is each rank's own."""
        # Horovod refuses one more than that, before a step or synchronize().
        self._left = max(self._left - 1, 0)
        return self._left > 0

    def zero_unused(self, optimizer: Any, *_: Any) -> None:
        """Before a step: set to zeros what Horovod does."""
        if self.zeroes:
            self.fill(optimizer)

    def fill(self, optimizer: Any) -> None:
        """Set to zeros what has no gradient, and a hook."""
        zero_unused(optimizer, trained=self._trained)


class DelayedOptimizer(AdoptedOptimizer):
    """The engine's side of an optimizer of several ranks that Horovod averages for.

    Attributes:
        delay: when it does; set before the engine takes the model.
    """

    delay: Delay
    own_passes = "before backward_passes_per_step were reached, with no synchronize() after"
    own_remedy = "Call optimizer.synchronize() before the step, or step out of skip_synchronize()"
    _told_of_apart = False
    _averaged = False
    """Whether all that is there is averaged already, by ``synchronize()``."""

    @property
    def by_own_gradients(self) -> bool:
        return self.lends_gradients

    def _own_gradients(self) -> str:
        if self.lends_gradients:
            return ""
        return (
            " Strategies that divide gradients step by what comes of it alone: to step by "
            "gradients that a script puts into p.grad itself use ddp."
        )

    # -- passes ----------------------------------------------------------------------------------

    def begin_pass(self, *, unsynced: bool) -> None:
        super().begin_pass(unsynced=unsynced)
        self.adds_own = self.delay.note_pass()

    def _keep_what_is_there(self, *, own: bool) -> None:
        if not self.lends_gradients:
            super()._keep_what_is_there(own=own)
        elif self._is_fetched if self.begun else not self._known().failed and self._has_any():
            # Horovod adds to it, and averages the sum.
            self._take_as_pass()

    def _has_any(self) -> bool:
        # Of each step: to walk a model's modules takes long.
        return any(one.grad is not None for one in (*self._updated(), *self._apart))

    def _take_as_pass(self) -> None:
        """Begin a step whose first pass has left what is in ``p.grad``, of each rank's own."""
        engine = self._known().engine
        assert isinstance(engine, StepEngine)
        # Engines may have them in memory that the next pass clears.
        held = [(p, p.grad.clone()) for p in engine.module.parameters() if p.grad is not None]
        for parameter, _ in held:
            parameter.grad = None
        if self.begun:
            with engine.precision.kept():
                engine.zero_grad()
        self._forget()

        def put() -> None:
            for parameter, grad in held:
                parameter.grad = engine.precision.scale(grad)

        nothing = torch.zeros((), device=self.world.device, requires_grad=True)
        engine.backward(LossSum(nothing, 1.0), run=put)
        self.begun, self.uncleared = True, False

    def add_by_hand(self, run: Callable[[], None]) -> None:
        own = self.delay.note_pass()
        if self.begun:
            if self._is_fetched:
                self._take_as_pass()
            engine = self._known().engine
            assert isinstance(engine, StepEngine)
            if engine.precision.scaler is not None:
                raise self._scaled_own()
            engine.lend_own_gradients()
        run()
        self._averaged = False
        self.synced |= not own

    # -- what ranks average ----------------------------------------------------------------------

    def synchronize(self) -> None:
        """Leave in ``p.grad`` the average over ranks of what is there. Collective."""
        self._average()
        self.delay.synchronized = self._averaged = True
        if self.lends_gradients:
            self.fetch_gradients()
            self.delay.fill(self.optimizer)

    def _average(self) -> None:
        """Have what is in ``p.grad`` be averaged once it is asked for, or stepped by."""
        if self.lends_gradients:
            if not self.begun or (self._averaged and self._is_fetched):
                self._take_as_pass()
        elif self._averaged and self.summed:
            raise ConfigError(
                "optimizer.synchronize() came before a step that is not within optimizer."
                "skip_synchronize(), and Horovod sums gradients over ranks twice then, with "
                "op=hvd.Sum. Strategy "
                f"'{self._session.strategy.name}' does so once. Step within skip_synchronize(); or "
                "use a strategy that leaves gradients whole, such as ddp."
            )
        self.synced, self._ends_own = True, False
        self.delay.restart()

    def _fetch(self) -> None:
        if not self.begun or self.is_own or self._is_fetched:
            super()._fetch()
            return
        apart = [one for one in self._apart if one.requires_grad]
        if apart and not self._leaves_apart():
            self._tell_of_apart(apart)
        elif apart:
            engine = self._known().engine
            assert isinstance(engine, StepEngine)
            # No hook is on what the optimizer has not.
            engine.lend_own_gradients()
            self._set_aside(self._apart)
        super()._fetch()
        if self.summed:
            scale_gradients(self._updated(), self.world.size)

    def _leaves_apart(self) -> bool:
        """Whether gradients of what the optimizer has not stay each rank's own."""
        # What steps are left out by is to be alike on all ranks, too.
        trained = any(one.requires_grad for one in self._apart)
        return trained and not self.skips and self._may_differ()

    def _tell_of_apart(self, apart: Sequence[torch.Tensor]) -> None:
        if self._told_of_apart or not self.world.is_main:
            return
        self._told_of_apart = True
        model = self.model
        assert model is not None
        log.warning(
            "the optimizer has not all that the loss trains (%s): Horovod leaves gradients of "
            "these to each rank, and here they are averaged over ranks as all others are, so that "
            "a norm of all of them is another. Freeze them (requires_grad_(False)), or clip what "
            "the optimizer has, and both do the same.",
            first_few([model.name_of(one) or "" for one in apart]),
        )

    @property
    def scales_loss(self) -> bool:
        return self.summed and not self.lends_gradients

    # -- a step ----------------------------------------------------------------------------------

    def take_step(self) -> None:
        delay = self.delay
        delay.zeroes = delay.synchronizes or (delay.synchronized and not self.lends_gradients)
        if delay.synchronizes:
            if delay.synchronized:
                warnings.warn(_AGAIN, stacklevel=4)
            if self.begun or self.lends_gradients:
                self._average()
        delay.synchronized = False
        if self.divided and self.is_by_hand:
            raise ConfigError(
                "optimizer.step() within skip_synchronize() came without a loss.backward(), by "
                "gradients of p.grad that are each rank's own, and strategy "
                f"'{self._session.strategy.name}' steps by averages. Step out of "
                "skip_synchronize(), which averages them; or use a strategy that leaves the "
                "optimizer whole, such as ddp without shard_optimizer."
            )
        if self.begun and self.lends_gradients and (self.summed or self._leaves_apart()):
            self.fetch_gradients()
        super().take_step()

    def _forget(self) -> None:
        super()._forget()
        self._averaged = False
