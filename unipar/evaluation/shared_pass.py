"""One forward pass from which both a loss and predictions are made."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from unipar.errors import ConfigError
from unipar.loss import LossFn
from unipar.objective import Objective
from unipar.state import changes_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a model, and what it gave."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    versions: list[int]
    """How often each tensor of the output had been changed in place by then."""

    @classmethod
    def seen(cls, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Call:
        return cls(args, kwargs, output, _versions(output))

    def gives(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether these arguments would make the same call, with its output as it was."""
        return (
            len(args) == len(self.args)
            and kwargs.keys() == self.kwargs.keys()
            and all(a is b for a, b in zip(args, self.args, strict=True))
            and all(kwargs[name] is value for name, value in self.kwargs.items())
            and self.intact
        )

    @property
    def intact(self) -> bool:
        """Whether nothing has been written into the output."""
        return self.versions == _versions(self.output)


def joined(
    loss: Objective, predict: Objective, update: Callable[[Any, Any], None]
) -> Objective | None:
    """The loss that also makes predictions of the output that it is given.

    ``None`` unless both take the model's arguments from the same function, so that they call the
    model alike.

    Args:
        loss: of the loss.
        predict: whose ``loss`` gives predictions and targets.
        update: takes these.
    """
    if predict.inputs is not loss.inputs:
        return None

    def both(output: Any, batch: Any) -> Any:
        versions = _versions(output)
        value = loss.loss(output, batch)
        if _versions(output) != versions:
            raise ConfigError(
                "the objective's loss(output, batch) changes the model's output in place, and "
                "metrics are to be made of the same output. Compute a new tensor (x = x + 1, not "
                "x += 1), or give predict an inputs function of its own: the model is then run "
                "once more for the metrics."
            )
        update(*predict.loss(output, batch))
        return value

    return Objective(loss.inputs, both, loss.num_items)


class Repeated:
    """Predictions made of the output that the loss function's own call of the model gave.

    An :class:`unipar.Objective` calls the model once, with what it says. What a plain function does
    with a model can only be watched: the first batch runs the model for the predictions too, and
    the outputs of later calls are taken over only if there both were equal, bit for bit, on all
    ranks, and the loss function had called the model once. A call whose arguments are other objects
    is made.

    Args:
        loss_fn: as in training.
        arguments: gives what predictions call the model with.
        watch: whether calls of the model can be watched: hooks change what a compiled one does.

    Attributes:
        trusted: whether outputs are taken over.
        equal: whether those that could have been were equal so far.
    """

    def __init__(
        self, loss_fn: LossFn, arguments: Callable[[Any], Arguments], *, watch: bool
    ) -> None:
        self._loss_fn, self._arguments = loss_fn, arguments
        self._watch = watch and not isinstance(loss_fn, Objective)
        self.trusted = isinstance(loss_fn, Objective)
        self.equal = self._watch

    @property
    def undecided(self) -> bool:
        """Whether :meth:`decide` is to be called after the batch."""
        return self._watch and not self.trusted

    def decide(self, equal: bool) -> None:
        """Take outputs over from now on, or stop watching; alike on all ranks."""
        self.trusted = self._watch = equal

    def run(self, model: Any, host: Any, data: Any) -> tuple[Any, Any]:
        """The loss of a micro-batch, and the model's output for the predictions.

        Args:
            model: what loss functions are given.
            host: the micro-batch as the loader gave it, in which items are counted.
            data: the same on the device.
        """
        calls: list[Call] = []
        if isinstance(self._loss_fn, Objective):
            count = self._loss_fn.count(host)
            args, kwargs = self._loss_fn.arguments(data)
            output = self._loss_fn.call(model, args, kwargs)
            calls.append(Call.seen(args, kwargs, output))
            loss = self._loss_fn.loss_of(output, data, count)
        elif self._watch and _can_be_watched(model):
            with _watching(model, calls):
                loss = self._loss_fn(model, data)
        else:
            loss = self._loss_fn(model, data)
        args, kwargs = self._arguments(data)
        same = len(calls) == 1 and calls[0].gives(args, kwargs)
        if same and self.trusted:
            return loss, calls[0].output
        output = model(*args, **kwargs)
        self.equal = self.equal and same and _equal(calls[0].output, output)
        return loss, output


def _can_be_watched(model: Any) -> bool:
    # A scripted module has that method to say that it has it not.
    inherited = getattr(type(model), "register_forward_hook", None)
    return inherited is nn.Module.register_forward_hook


@contextlib.contextmanager
def _watching(model: nn.Module, calls: list[Call]) -> Iterator[None]:
    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls.append(Call.seen(args, kwargs, output))

    handle = model.register_forward_hook(note, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _versions(output: Any) -> list[int]:
    # Not public in torch 2.13 (torch/utils/_pytree.py); transformers has its outputs known there.
    return [changes_of(leaf) for leaf in _pytree.tree_leaves(output)]


def _equal(one: Any, other: Any) -> bool:
    """Return whether two outputs are made alike, and of equal tensors and plain values."""
    left, right = _pytree.tree_flatten(one), _pytree.tree_flatten(other)
    return left[1] == right[1] and all(
        isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and _equal_tensors(a, b)
        if isinstance(a, torch.Tensor)
        else a is b or (isinstance(a, (bool, int, float, str)) and a == b)
        for a, b in zip(left[0], right[0], strict=True)
    )


def _equal_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    plain = type(one) is type(other) is torch.Tensor and one.layout == other.layout == torch.strided
    return plain and one.dtype == other.dtype and torch.equal(one, other)
