"""What a loss function finds of a model's tensors that other stages have.

It may list the model's parameters, which it knows as a variable. Without those of other stages in
the list, a penalty over all weights would be one over the weights of the last stage.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from unipar.engine.absent import HARMLESS, asked_for
from unipar.errors import ConfigError

_HARMLESS = HARMLESS | {
    *("__len__", "dim", "get_device", "is_complex", "is_floating_point", "is_nested"),
    *("is_quantized", "itemsize", "nbytes", "requires_grad", "size"),
}
_ITSELF = {"data", "detach"}
"""What gives another tensor of the same values, which are not there either."""


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    inexact = dtype.is_floating_point or dtype.is_complex
    return torch.full((), math.nan if inexact else 0, dtype=dtype, device=device)


class AbsentTensor(torch.Tensor):
    """Takes no memory, says what it is, and is not computed with."""

    _name: str
    _is_param: bool
    """By which torch knows a parameter of another class (torch 2.13, nn/parameter.py)."""

    @staticmethod
    def of(name: str, value: torch.Tensor, device: torch.device) -> AbsentTensor:
        """One in the place of a parameter or buffer of another stage."""
        with torch._C.DisableTorchFunctionSubclass():
            absent = _nothing(value.dtype, device).expand(value.shape).as_subclass(AbsentTensor)
            absent._name, absent._is_param = name, isinstance(value, nn.Parameter)
            absent.requires_grad_(value.requires_grad)
            return absent

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = asked_for(func)
        # One that is set would be set on this stage alone. No stage sees another's gradients.
        if func.__name__ != "__set__" or name == "grad":
            if name in _HARMLESS:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **(kwargs or {}))
            if name in _ITSELF:
                return args[0]
        leaves = tree_leaves((args, kwargs))
        names = (f"'{leaf._name}'" for leaf in leaves if isinstance(leaf, AbsentTensor))
        absent = next(names, "a weight")
        raise ConfigError(
            f"mesh: the loss function uses {absent} of the model, which another stage has. With pp "
            "the loss is computed on the last stage, from what the model returns, and the weights "
            "of other stages are not there. For a penalty over the weights set the optimizer's "
            "weight_decay; for what else is made of them use strategy='ddp', which keeps all of "
            "them on every rank."
        )


class AbsentTensors:
    """The tensors that a stage lacks, in the order that their modules list them in."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Tied ones are one, as a loss that counts each once expects.
        self._made: dict[torch.Tensor, AbsentTensor] = {}
        self._places: dict[int, _Place] = {}

    def add(self, part: nn.Module, tensors: dict[str, Any], key: str, name: str) -> None:
        """Note a tensor before it goes.

        Args:
            part: the module that has it.
            tensors: the module's parameters, or its buffers.
            key: its name there.
            name: its name in the model.
        """
        value = tensors[key]
        if value not in self._made:
            self._made[value] = AbsentTensor.of(name, value, self._device)
        place = self._places.setdefault(id(tensors), _Place(vars(part), tensors, [*tensors], {}))
        place.absent[key] = self._made[value]

    @contextmanager
    def listed(self, others: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Have the modules list them, too.

        Args:
            others: by name, what to list in the place of some.
        """
        hidden: list[tuple[dict[str, Any], dict[str, Any]]] = []
        try:
            for attributes, tensors, order, absent in self._places.values():
                # An attribute, which stands in for the tensor elsewhere, is found before that.
                hidden.append((attributes, {key: attributes.pop(key) for key in absent}))
                every = tensors | {k: others.get(one._name, one) for k, one in absent.items()}
                tensors.clear()
                tensors.update({key: every.pop(key) for key in order if key in every}, **every)
            yield
        finally:
            for place, (attributes, stand_ins) in zip(self._places.values(), hidden, strict=False):
                for key in place.absent:
                    place.tensors.pop(key, None)
                attributes.update(stand_ins)


@contextmanager
def absent_listed(
    absent: Iterable[AbsentTensors], others: Mapping[str, torch.Tensor] | None = None
) -> Iterator[None]:
    """Have all stages of a rank list them, of which the user's module is any.

    Args:
        absent: of each stage.
        others: as of :meth:`AbsentTensors.listed`.
    """
    with ExitStack() as listing:
        for one in absent:
            listing.enter_context(one.listed(others or {}))
        yield


class _Place(NamedTuple):
    """One module's parameters or buffers, of which some are absent."""

    attributes: dict[str, Any]
    tensors: dict[str, Any]
    order: list[str]
    absent: dict[str, AbsentTensor]
