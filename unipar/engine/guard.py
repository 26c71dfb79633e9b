"""Refusing what would touch the gradients of a step besides the engine's own backward passes."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from unipar.combined import optimizers_in
from unipar.engine.absent import Absence, AbsentGradient, LoopCalls
from unipar.engine.average import LossAverage
from unipar.engine.inner import HIDING, passes_begun
from unipar.engine.reducer import Reducer
from unipar.errors import ConfigError, first_few

Mark = tuple[int, int]
"""Which gradient a parameter has, and how often it was changed; not its values."""

NOTHING: Mark = (id(None), 0)

FindUnused = Callable[[Sequence[nn.Parameter]], Collection[nn.Parameter]]


def find_none(_: Sequence[nn.Parameter]) -> Collection[nn.Parameter]:
    """Nobody knows which are unused."""
    return ()


class GradientGuard:
    """Compares which gradients there are before and after code that is the user's.

    It looks at addresses and counts of changes on the host, and never at a value.

    Args:
        reducer: says where the gradients of its module are.

    Attributes:
        lends: whether a loop may use the gradient of a step before the step.
        nothing: what :meth:`look` finds before a step's first backward pass.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        # Frozen ones too: they may be thawed between steps.
        self._parameters = list(reducer.module.parameters())
        self.nothing = [NOTHING] * len(self._parameters) if reducer.watches_gradients else []
        self._why = Absence()
        self._find_unused: FindUnused = find_none
        self.lends = self._kept = False
        # One for each parameter, once there is one.
        self._absents: list[AbsentGradient | None] = [None] * len(self._parameters)
        self._hidden: list[tuple[nn.Parameter, torch.Tensor | None, AbsentGradient]] = []
        self._marks: list[Mark] = []
        self._passes = 0
        self._open = self._lent = self._touched = False

    @property
    def calls(self) -> LoopCalls:
        """Those of the loop, for messages."""
        return self._why.calls

    @calls.setter
    def calls(self, calls: LoopCalls) -> None:
        self._why.calls = calls

    def clear(self) -> None:
        """Begin another step."""
        self._marks, self._passes, self._open = [], 0, False
        self._lent = self._touched = False
        if self._hidden:
            self._show()

    # -- a loss function in a whole step ---------------------------------------------------------

    def compare(self, before: list[Mark]) -> None:
        """Refuse gradients that a loss function has touched.

        Args:
            before: from :meth:`look`, or :attr:`nothing`.

        Raises:
            ConfigError: there are some.
        """
        if before is self.nothing:
            for parameter in self._parameters if before else ():
                if parameter.grad is not None:
                    break
            else:
                return
        if before != (now := self.look()):
            triples = zip(self._parameters, before, now, strict=True)
            self._refuse([p for p, a, b in triples if a != b])

    def look(self) -> list[Mark]:
        """Return what :meth:`compare` is given after the user's code."""
        if not self._reducer.watches_gradients:
            return []
        # Of a class of tensors with functions of its own, each attribute would take twice as long.
        with torch._C.DisableTorchFunctionSubclass():
            grads = [parameter.grad for parameter in self._parameters]
            return [NOTHING if grad is None else _mark(grad) for grad in grads]

    # -- a user's own loop -----------------------------------------------------------------------

    def open(self, *, begun: bool) -> None:
        """Let a forward pass, and the gradients that a loss takes of it, find what is hidden.

        Raises:
            ConfigError: gradients were touched.
        """
        if self.lends and self._hidden:
            # The loop may ask for them after this forward pass as before it.
            self._compare(self.look(), begun=begun)
            return
        self.check(begun=begun)
        if self._lent:
            return
        if not self._open:
            self._open = True
            self._marks, self._passes = self.look(), passes_begun()
        elif begun:
            self._marks = self.look()

    def lend(
        self,
        fetch: Callable[[], None],
        find_unused: FindUnused,
        kept: bool,
    ) -> None:
        """Let a loop use the gradient of a step, which is fetched when it does so.

        Args:
            fetch: puts it into ``parameter.grad``, and calls :meth:`lent`.
            find_unused: finds among parameters, after each backward pass, those that are used on no
                rank.
            kept: whether the loop may do what it likes before a step's first backward pass.
        """
        self._why.fetch, self._find_unused, self._kept = fetch, find_unused, kept
        self.lends = True

    def note(self) -> None:
        """Take for the engine's own what is there before a step's first backward pass."""
        if self._open and not self._lent:
            self._marks = self.look()

    def lent(self) -> None:
        """The gradient of the step is there, and the loop may do with it what it likes."""
        self._lent = True
        self._marks = self.look()

    @property
    def changed(self) -> bool:
        """Whether it has done something with it."""
        return self._touched or (self._lent and self.look() != self._marks)

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Surround what the engine itself does with it, on all ranks alike."""
        self._touched = self.changed
        yield
        self._marks = self.look()

    def hide(self, *, stepped: bool = False) -> None:
        """After a backward pass: let nobody take for the step's what is in ``parameter.grad``.

        Args:
            stepped: whether the step is done, and gradients are gone.
        """
        self._why.stepped = stepped
        self._lent = False
        if self._reducer.hides_gradients or self.lends:
            unused = {*self._find_unused(self._parameters)}
            # A framework's own class of parameters may do things when they are set.
            with torch._C.DisableTorchFunctionSubclass():
                for index, parameter in enumerate(self._parameters):
                    grad = parameter.grad
                    # One that was frozen since has the gradient of an earlier pass.
                    if grad is None and not parameter.requires_grad:
                        continue
                    if grad is None and parameter in unused:
                        continue
                    absent = self._absents[index]
                    # ZeRO's third stage changes the shapes of parameters.
                    if absent is None or absent.shape != parameter.shape:
                        absent = self._absents[index] = AbsentGradient.of(parameter, self._why)
                    parameter.grad = absent
                    self._hidden.append((parameter, grad, absent))
            if self._hidden:
                HIDING.add(self)
        self._marks = self.look()

    def lifted(self) -> AbstractContextManager[None]:
        """Surround a pass with ``None`` where stand-ins are.

        What compiles describes ``parameter.grad`` too (torch 2.13, _subclasses/meta_utils.py), and
        a backward pass of another engine's loss adds to it.
        """
        return self._lifted() if self._hidden else contextlib.nullcontext()

    @contextlib.contextmanager
    def _lifted(self) -> Iterator[None]:
        with torch._C.DisableTorchFunctionSubclass():
            held = [(p, absent) for p, _, absent in self._hidden if p.grad is absent]
            for parameter, _ in held:
                parameter.grad = None
        try:
            yield
        finally:
            with torch._C.DisableTorchFunctionSubclass():
                for parameter, absent in held:
                    # What the pass itself has put there is to be seen.
                    if parameter.grad is None:
                        # ZeRO's third stage may leave what it has gathered for the pass.
                        absent.fit(parameter)
                        parameter.grad = absent

    def check(self, *, begun: bool) -> None:
        """Refuse gradients that something else than the engine's backward passes has touched.

        Args:
            begun: whether there was such a pass in this step. Before the first, a loop may clear
                what another engine has left, and backward passes of other engines may go through
                the model, as a GAN's do; what they leave is dropped by that pass.

        Raises:
            ConfigError: something has.
        """
        if self._lent or (not begun and (self._kept or not self._open)):
            return
        now = self.look()
        if self._hidden:
            self._show()
        self._compare(now, begun=begun)

    def _compare(self, now: list[Mark], *, begun: bool) -> None:
        if self.lends:
            # A gradient that was set to None is one that the loop does without.
            pairs = zip(self._marks, now, strict=True)
            now = [old if new == NOTHING else new for old, new in pairs]
        if self._marks == now or (not begun and self._passes != passes_begun()):
            return
        triples = zip(self._parameters, self._marks, now, strict=True)
        self._refuse([p for p, a, b in triples if b != a and (begun or b != NOTHING)])

    def _show(self) -> None:
        HIDING.discard(self)
        with torch._C.DisableTorchFunctionSubclass():
            while self._hidden:
                parameter, grad, absent = self._hidden.pop()
                if parameter.grad is absent:
                    parameter.grad = grad

    def _refuse(self, changed: Sequence[nn.Parameter]) -> None:
        if not changed:
            return
        ids = {id(parameter) for parameter in changed}
        names = [name for name, p in self._reducer.module.named_parameters() if id(p) in ids]
        raise ConfigError(
            f"gradients were changed by something else than {self.calls.backward}: "
            f"{first_few(names)}. They are not yet what the optimizer gets: not divided by the "
            "number of items, and on most strategies not reduced over the ranks. Clip by "
            f"{self.calls.clip}, scale the loss instead of its gradient, leave parameters out by "
            "requires_grad_(False) before the forward pass instead of p.grad = None, add losses "
            f"before one {self.calls.backward}, give a step up by {self.calls.clear}, let no "
            f"backward pass of another model go through this one before {self.calls.step}; and in "
            "a loss function take gradients by torch.autograd.grad, not by backward() and "
            "zero_grad(). Strategies such as ddp leave gradients whole, and let a loop change them."
        )


class Stepping(Protocol):
    """An engine, as the guard of its optimizer knows it."""

    average: LossAverage

    def give_up(self) -> None:
        """Be ready for another step after one that failed."""


def guard_optimizer(
    optimizer: Optimizer, engine: Stepping, *, clearing: bool
) -> Callable[[], None]:
    """Refuse a user's own ``optimizer.step()`` while an engine is in the middle of a step.

    Args:
        optimizer: the user's.
        engine: gives that step up; it is not kept alive.
        clearing: whether to refuse ``optimizer.zero_grad()``, too.

    Returns:
        What takes the refusal back.
    """
    found = weakref.ref(engine)

    def refuse(*args: Any, **kwargs: Any) -> None:
        if (stepping := found()) is not None and stepping.average.begun:
            stepping.give_up()
            raise ConfigError(
                "engine.optimizer was told to step or to clear gradients between "
                "engine.backward(loss) and engine.step(), where gradients are not yet those of "
                "the global batch, or not in the optimizer's hands. Call engine.step(), which "
                "reduces, clips, steps and clears; or engine.zero_grad(), which gives the step up."
            )

    handles = [one.register_step_pre_hook(refuse) for one in optimizers_in(optimizer).values()]
    if clearing:
        clear = optimizer.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            refuse()
            clear(set_to_none)

        optimizer.zero_grad = zero_grad  # pyright: ignore[reportAttributeAccessIssue]

    def undo() -> None:
        for handle in handles:
            handle.remove()
        optimizer.__dict__.pop("zero_grad", None)

    return undo


def _mark(grad: torch.Tensor) -> Mark:
    if isinstance(grad, AbsentGradient):
        return id(grad), 0
    # Frameworks whose gradients are views of one buffer make such views again.
    return id(grad) if grad.is_sparse else grad.data_ptr(), grad._version
