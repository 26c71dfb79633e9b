"""What tells two forward passes of a model apart that may not compute the same: their graphs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from unipar.engine.graphs import nodes_behind

_MOST_SHAPES, _MOST_GRAPHS = 8, 64
_NEAR, _ONE_IN = 24, 16
"""Shapes are those at so many nodes next to what the model gives, and at one of so many others."""


class Signatures:
    """Those of the graphs that a model has been tried with.

    A graph is known by the kinds of its nodes, in their order, by the shapes of what goes through
    them, as far as these are not those of the inputs, and by what was drawn on the way. Branches,
    loops of another length and sequences cut at their longest show there; values do not.

    Attributes:
        endless: whether there are so many that no more are told apart.
        used: of the last one, what tells which parameters are in it.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], set[int]] = {}
        self.endless, self.used = False, 0

    def note(
        self,
        outputs: Iterable[torch.Tensor],
        sizes: Sequence[Iterable[int]],
        draws: Sequence[Any],
        numbers: Mapping[int, int],
    ) -> bool:
        """Take notice of a pass; whether there was none like it before.

        Where shapes depend on values in ever new ways, as where tokens are sent to experts, kinds
        of nodes alone tell.

        Args:
            outputs: with their graphs.
            sizes: the shapes of what the model was given.
            draws: what was drawn by which calls, and of how many dimensions.
            numbers: of parameters, by their identities.
        """
        names, shapes, self.used = _signature(outputs, sizes, numbers)
        key = (names, hash(tuple(draws)))
        known = self._known.get(key)
        if known is None:
            self.endless |= len(self._known) >= _MOST_GRAPHS
            if not self.endless:
                self._known[key] = {shapes}
            return not self.endless
        if shapes in known or len(known) >= _MOST_SHAPES:
            return False
        known.add(shapes)
        return True


def _signature(
    outputs: Iterable[torch.Tensor], sizes: Sequence[Iterable[int]], numbers: Mapping[int, int]
) -> tuple[int, int, int]:
    own: dict[int, str] = {}
    for at, shape in enumerate(sizes):
        for dim, size in enumerate(shape):
            own.setdefault(size, f"{at}.{dim}")
    # Samples and places in a sequence are often one dimension within.
    for size, name in list(own.items()):
        for other, second in list(own.items()):
            own.setdefault(size * other, f"{name}*{second}")
    nodes = list(nodes_behind(one.grad_fn for one in outputs))
    # To read a shape takes longer than all else. What is cut early shows everywhere, and what is
    # cut late near the end.
    shapes = [
        own.get(size, size)
        for node in [*nodes[:_NEAR], *nodes[_NEAR::_ONE_IN]]
        # torch 2.13, csrc/autograd/python_cpp_function.cpp.
        for one in node._input_metadata
        for size in one.shape
    ]
    used = [numbers.get(id(node.variable), -1) for node in nodes if hasattr(node, "variable")]
    return hash(tuple([node.name() for node in nodes])), hash(tuple(shapes)), _alike(used)


def _alike(numbers: Iterable[int]) -> int:
    """A hash that is the same in every process; of texts it is not."""
    return hash(tuple(sorted(numbers)))
