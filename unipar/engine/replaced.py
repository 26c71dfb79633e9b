"""Tensors of a model that a script holds, and that a strategy has put others in the place of.

``weights = list(model.parameters())`` before a model is divided, and ``weight.clamp_(-c, c)``
after: in PyTorch that changes the model.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

_STANDS_FOR = "_unipar_stands_for"


class ReplacedParameter(nn.Parameter):
    """One that a script holds, once another has its place: all that is done to it, that one gets.

    A parameter is given this class. It cannot be given the other's content, as by
    ``torch.utils.swap_tensors``: DTensors have slots, and parameters none.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*in_place(args), **in_place(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        return getattr(_in_place_of(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_in_place_of(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_in_place_of(self), name)

    # Torch's own copy what is in this one.
    def __reduce_ex__(self, proto: Any) -> Any:
        return _in_place_of(self).__reduce_ex__(proto)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(_in_place_of(self), memo)


class Held:
    """A model's tensors before a strategy has it, in case that a script holds some of them.

    Args:
        module: as it was given.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # A strategy may let go of them one by one.
        self._parameters = {n: weakref.ref(one) for n, one in module.named_parameters()}
        self._buffers = {n: weakref.ref(one) for n, one in module.named_buffers()}

    def lead_on(self) -> None:
        """Have those that were replaced stand for what has their places."""
        now = dict(self._module.named_parameters())
        for name, ref in self._parameters.items():
            old, new = ref(), now.get(name)
            # One of a class of the script's own may be of another make.
            if new is None or old is None or old is new or type(old) is not nn.Parameter:
                continue
            holder, _, own = name.rpartition(".")
            place = weakref.ref(self._module.get_submodule(holder)), own
            vars(old)[_STANDS_FOR] = place, new
            old.__class__ = ReplacedParameter
        now = dict(self._module.named_buffers())
        for name, ref in self._buffers.items():
            old, new = ref(), now.get(name)
            if old is None or new is None or old is new:
                continue
            if type(old) is type(new) is torch.Tensor:
                # Each rank has all of it.
                old.data = new


def in_place(given: Any) -> Any:
    """What is given, with what the model has now for each replaced parameter in it."""
    return tree_map_only(ReplacedParameter, _in_place_of, given)


def put_in_place(groups: Iterable[dict[str, Any]]) -> None:
    """Give an optimizer's groups what has the places of replaced parameters in them."""
    for group in groups:
        if ReplacedParameter in map(type, group["params"]):
            group["params"] = [replacement_of(one) for one in group["params"]]


def replacement_of(parameter: Any) -> Any:
    """What a strategy has put in the place of a parameter; else itself."""
    while type(parameter) is ReplacedParameter:
        _, parameter = vars(parameter)[_STANDS_FOR]
    return parameter


def _in_place_of(parameter: Any) -> Any:
    """What the model has there: during a pass it may be what is gathered for it."""
    (holder, name), _ = vars(parameter)[_STANDS_FOR]
    module = holder()
    there = None if module is None else module._parameters.get(name)
    if there is None or isinstance(there, ReplacedParameter):
        return replacement_of(parameter)
    return there
