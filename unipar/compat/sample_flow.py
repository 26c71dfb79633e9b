"""Which of what a script computes of a rank's part of a batch is what it would be of the whole.

A script that knows nothing of ranks computes as if it had whole batches. What it computes of each
sample by itself, and sums and means of that, can be put together from parts. What sets samples in
relation (``x - x.mean(0)``, ``x.flip(0)``, ``distances(x, x)``) cannot, with a graph or without. So
operations outside of models are followed from the batch to a model's inputs, and from its outputs
to the loss: of each tensor it is known along which dimension samples lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from unipar.compat.sample_lookups import AnyCall
from unipar.compat.sample_rules import Coupled, Drawn, Flow, NotTold, Reduced, Samples, Some
from unipar.engine.outputs import tensors_of


class SampleFlow(TorchDispatchMode):
    """Follows the samples of batches through operations, where it is not paused.

    Args:
        idle: whether what runs now is none of the script's own.

    Attributes:
        follows: whether operations are followed, but for where that is paused.
        has_seen: whether there was a part of several samples, without which nothing is to be seen.
    """

    _FIRST, _EVERY = 16, 16
    """It looks at so many batches at first, and then at one of so many, for it takes time."""

    def __init__(self, idle: Callable[[], bool]) -> None:
        super().__init__()
        self._idle = idle
        self._flows: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._batches = self._within = 0
        self._outer: object | None = None
        self.follows = self.has_seen = False

    def begin(self, batch: Any, samples: int, loop: object) -> None:
        """A part of a batch is given to the script, which trains on it.

        Args:
            batch: containers of tensors.
            samples: of the part.
            loop: over such batches. Within one the batches of another may be read.
        """
        self._within = 0 if self._outer is loop else self._within + 1
        # One that a script has left may still be held.
        if self._outer is None or self._within > self._FIRST:
            self._outer, self._within = loop, 0
        if self._outer is loop:
            self._batches += 1
            wanted = self._batches <= self._FIRST or self._batches % self._EVERY == 0
            if wanted and not self.follows:
                self.follows = True
                self.__enter__()
            elif not wanted:
                self.stop()
        if self.follows and samples > 1:
            self.has_seen = True
            for tensor in tensors_of(batch):
                self._note(tensor, samples)

    def end(self, loop: object) -> None:
        """The loop is done with its batch; what it lies within, if any, is not with its own."""
        if self._outer is loop:
            self.stop()

    def leave(self, loop: object) -> None:
        """The loop has ended."""
        self.end(loop)
        if self._outer is loop:
            self._outer = None

    def stop(self) -> None:
        """Follow nothing until there is another batch."""
        if self.follows and _innermost() is self:
            self.__exit__(None, None, None)
            self.follows = False

    def pause(self) -> bool:
        """Leave operations alone until :meth:`go_on`; whether there is something to go on with."""
        if self.follows and _innermost() is self:
            self.__exit__(None, None, None)
            return True
        return False

    def go_on(self) -> None:
        self.__enter__()

    def computed(self, output: Any, inputs: Any, samples: int) -> None:
        """A model has computed an output of a part.

        Args:
            output: containers of tensors.
            inputs: likewise.
            samples: of the part.
        """
        if not self.follows or samples < 2:
            return
        flows = [f for one in tensors_of(inputs) if isinstance(f := self._flows.get(one), Samples)]
        for tensor in tensors_of(output):
            if tensor.dim() == 0:
                self._flows[tensor] = Reduced("mean")
                continue
            for flow in flows:
                length = sum(flow.sets)
                if flow.dim < tensor.dim() and tensor.shape[flow.dim] == length:
                    self._flows[tensor] = flow
                    break
            else:
                self._note(tensor, samples)

    def coupled(self, values: Any, *, reduced: bool) -> Coupled | None:
        """What among values sets samples in relation.

        Args:
            values: containers of tensors.
            reduced: whether sums and means over samples do, as where a model is given them.
        """
        for tensor in tensors_of(values):
            flow = self._flows.get(tensor)
            if isinstance(flow, Coupled):
                return flow
            if isinstance(flow, Some):
                # A script may leave out samples for what they are, in a loop over all of them.
                return Coupled(flow.how, known=reduced or len(flow.places) == 1)
            if reduced and isinstance(flow, Reduced):
                return Coupled(f"a {flow.kind} over its samples is taken", True)
        return None

    def _note(self, tensor: torch.Tensor, samples: int) -> None:
        for dim, size in enumerate(tensor.shape):
            if size == samples:
                self._flows[tensor] = Samples(dim, (samples,))
                return

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._idle():
            return out
        given = {id(one): f for one in tensors_of((args, kwargs)) if (f := self._flows.get(one))}
        if given or torch.Tag.nondeterministic_seeded in func.tags:
            self._follow(func, args, kwargs, out, given)
        return out

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any, given: dict[int, Flow]) -> None:
        made = list(tensors_of(out))
        if not made:
            return
        call = AnyCall(func, args, kwargs, made, given)
        try:
            flows = call.flows()
        except NotTold as problem:
            # What a script computes by itself is gradients of what is told of already.
            of_graph = torch._C._current_graph_task_id() != -1  # torch 2.13, csrc/autograd.
            coupled = None if of_graph else Coupled(call.told(), problem.known)
            flows = [coupled] * len(made)
        base = made[0]._base if call.mutates else None
        if base is not None and flows[0] is not None:
            self._flows[base] = self._written(base, made[0], flows[0]) or Coupled(
                call.told(), False
            )
        for tensor, flow in zip(made, flows, strict=True):
            if flow is not None:
                self._flows[tensor] = flow
            elif tensor in self._flows:
                del self._flows[tensor]

    def _written(self, base: torch.Tensor, part: torch.Tensor, flow: Flow) -> Flow | None:
        """Of what a part is written to, and the rest is what it was; ``None`` if not known."""
        before = self._flows.get(base)
        if isinstance(flow, Coupled):
            return flow
        if isinstance(flow, Drawn):
            return before or flow
        if not isinstance(flow, Samples):
            return None
        size, step = part.shape[flow.dim], part.stride(flow.dim)
        for dim in range(base.dim()):
            if base.shape[dim] == size and base.stride(dim) == step:
                found = Samples(dim, flow.sets)
                return found if before in (None, found) or isinstance(before, Drawn) else None
        return None


def _innermost() -> Any:
    # torch 2.13, torch/utils/_python_dispatch.py.
    length = torch._C._len_torch_dispatch_stack()
    return torch._C._get_dispatch_stack_at(length - 1) if length else None
