"""Whether a model sets samples in relation to each other, as the shapes of what it computes show.

Values show it in batches in which it has an effect. An outlier that is measured by the mean of a
batch may come late, and so may a term whose weight grows from zero.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from unipar.compat.dividing.cutting import leaves_in

_READS = {"item", "tolist", "numpy", "__float__"}
"""Functions that give a tensor's values to Python; what branches by them shows in its graph."""
_NO_FIGURES = {
    "empty_like", "full_like", "ones_like", "zeros_like", "rand_like", "randn_like", "randint_like",
    "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros",
    "isfinite", "isinf", "isnan", "bincount", "histc",
    "_pack_padded_sequence",
}  # fmt: skip
"""Functions that make nothing of the values that they are given, but checks and counts of them."""
_BY_VALUES = {"masked_select", "nonzero", "argwhere", "unique", "unique_consecutive"}
"""Functions whose output has as many entries as values say."""

_unseen = 0
"""How many functions are at work whose calls are not noted."""


class _Tensor(NamedTuple):
    """What is known of a tensor in one run: a number that it has there, its shape, its dtype."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Call(NamedTuple):
    """A function of torch that was called with tensors."""

    name: str
    given: tuple[_Tensor, ...]
    made: tuple[_Tensor, ...]


class Calls(TorchFunctionMode):
    """Notes what a model calls.

    Attributes:
        noted: calls, in their order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Call] = []
        self._numbers: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _unseen:
            return func(*args, **kwargs)
        given = [(one, self._number(one)) for one in leaves_in((args, kwargs), rows=False)]
        found = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        # What is written to is another tensor from then on.
        made = leaves_in(args[:1] if name == "__setitem__" else found, rows=False)
        if given and (made or name in _READS):
            numbered = [(one, self._number(one, anew=True)) for one in made]
            self.noted.append(Call(name, _described(given), _described(numbered)))
        return found

    def _number(self, one: torch.Tensor, *, anew: bool = False) -> int:
        known = self._numbers.get(id(one))
        if anew or known is None or known[0]() is not one:
            self._count += 1
            known = self._numbers[id(one)] = weakref.ref(one), self._count
        return known[1]


def not_noted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose calls tell nothing: it computes a part in another way than the whole."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        global _unseen
        _unseen += 1
        try:
            return function(*args, **kwargs)
        finally:
            _unseen -= 1

    return call


def relates(whole: Sequence[Call], part: Sequence[Call]) -> bool:
    """Whether something that is made of all samples goes into what is computed of each.

    Args:
        whole: what was called with all samples.
        part: what was called with some. Where that is something else, nothing can be told.
    """
    if [one.name for one in whole] != [one.name for one in part]:
        return False
    of_all: set[int] = set()
    for one, other in zip(whole, part, strict=True):
        if len(one.given) != len(other.given) or len(one.made) != len(other.made):
            return False
        takes = any(tensor.number in of_all for tensor in one.given)
        if takes and one.name in _READS and one.given[0].dtype.is_floating_point:
            return True
        rows = [a for a, b in zip(one.given, other.given, strict=True) if a.shape != b.shape]
        # Counts and flags are mostly of masks, lengths and checks.
        figures = takes or any(tensor.dtype.is_floating_point for tensor in rows)
        if one.name in _BY_VALUES or (one.name == "__getitem__" and rows[1:]):
            figures = False
        for made, same in zip(one.made, other.made, strict=True):
            if takes and made.shape != same.shape:
                return True
            if figures and made.shape == same.shape and one.name not in _NO_FIGURES:
                of_all.add(made.number)
    return False


def _described(tensors: Sequence[tuple[torch.Tensor, int]]) -> tuple[_Tensor, ...]:
    return tuple(_Tensor(number, tuple(one.shape), one.dtype) for one, number in tensors)
