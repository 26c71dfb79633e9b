"""What a loss function finds of a model's tensors that other stages have.

It may list the model's parameters, which it knows as a variable. Without those of other stages in
the list, a penalty over all weights would be one over the weights of the last stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from unipar.engine import AbsentTensor


def _refusal(name: str) -> str:
    return (
        f"mesh: the loss function uses {name} of the model, which another stage has. With pp "
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
            self._made[value] = AbsentTensor.of(
                name, value, _refusal, shape=value.shape, device=self._device
            )
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
                every = tensors | {
                    k: others.get(one.name_in_model, one) for k, one in absent.items()
                }
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
