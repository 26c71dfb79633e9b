"""A loss in parts: the inputs of the model, the loss of its output, the number of items."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from unipar.errors import ConfigError
from unipar.loss import IGNORE_INDEX, Loss, LossFn, LossSum
from unipar.utils.calls import was_refused
from unipar.utils.functions import check_function

_EXAMPLE = (
    "unipar.Objective(inputs=lambda batch: {'input_ids': batch['input_ids']}, "
    "loss=lambda output, batch: cross_entropy(output.logits.flatten(0, 1), "
    "batch['labels'].flatten()), num_items=lambda batch: (batch['labels'] != -100).sum())"
)


@dataclass(frozen=True)
class Objective:
    """A loss function whose one call of the model can be seen from outside.

    It can be given wherever a loss function can, and called like one. A pipeline takes nothing
    else, since no process of it can call the whole model.

    Attributes:
        inputs: ``inputs(batch)`` gives the arguments of the model: a mapping of its keyword
            arguments, a tuple of its positional ones, or a tensor, which is the only one. Anything
            else goes into a tuple: ``(graph,)``.
        loss: ``loss(output, batch)`` gives a mean, or a :class:`unipar.LossSum`, which counts its
            own items.
        num_items: ``num_items(batch)`` gives the number of items that the mean is over, as
            ``engine.backward(loss, num_items=…)`` is given it: a number that is known on the host,
            of this batch on this rank. Left out, or where it gives ``None``: its samples.
        shifts_labels: whether the model's own loss compares each output with the label after it.
            Where ranks hold parts of sequences it is then given ``shift_labels`` too, the labels
            in their places, as models of transformers take them.

    Raises:
        ConfigError: one of them is no function of these arguments.
    """

    inputs: Callable[[Any], Any]
    loss: Callable[[Any, Any], Any]
    num_items: Callable[[Any], float | torch.Tensor | None] | None = None
    shifts_labels: bool = False

    def __post_init__(self) -> None:
        check_function(self.inputs, "inputs", ("batch",))
        check_function(self.loss, "loss", ("output", "batch"))
        if self.num_items is not None:
            check_function(self.num_items, "num_items", ("batch",))

    @classmethod
    def of_model(cls, model: Any) -> Objective:
        """The objective of a model that computes its own loss, by the Hugging Face convention.

        The batch is passed as keyword arguments when it is a mapping, as positional ones when it is
        a list or tuple, and as one argument otherwise. Where it has class labels, the model's
        mean is over those that are not -100; causal language models predict none by the first of
        each row.

        Args:
            model: what tells whether it is causal, wrapped or not; ``engine.module`` is.
        """
        inner = _without_wrappers(model)
        shifts, counts = _shifts_labels(inner), _classifies(inner)
        return _OwnLoss(
            _whole_batch,
            _loss_of_output,
            lambda batch: _num_labels(batch, shifts=shifts) if counts else None,
            shifts_labels=shifts,
            model=model,
        )

    def __call__(self, model: Any, batch: Any) -> Any:
        """As a loss function: ``loss(model, batch)``."""
        args, kwargs = self.arguments(batch)
        return self.loss_of(self.call(model, args, kwargs), batch, self.count(batch))

    def counted(self, batch: Any) -> LossFn:
        """The loss function of this batch, its items counted now, before it leaves the host."""
        count = self.count(batch)

        def loss_fn(model: Any, data: Any) -> Any:
            args, kwargs = self.arguments(data)
            return self.loss_of(self.call(model, args, kwargs), data, count)

        return loss_fn

    def call(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model with :meth:`arguments`; its output."""
        return model(*args, **kwargs)

    def calling(self, batch: Any) -> AbstractContextManager[None]:
        """Surround what calls the model with :meth:`arguments` of a batch by itself."""
        return contextlib.nullcontext()

    def arguments(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and keyword arguments that the model is to be called with.

        Raises:
            ConfigError: ``inputs`` gives something else.
        """
        given = self.inputs(batch)
        if isinstance(given, torch.Tensor):
            return (given,), {}
        # A named tuple is often one argument, and a list may be either.
        if type(given) is tuple:
            return given, {}
        if isinstance(given, Mapping) and all(isinstance(key, str) for key in given):
            return (), dict(given)
        raise ConfigError(
            f"the objective's inputs(batch) gave a {type(given).__name__}. Return a mapping of the "
            "model's keyword arguments by their names, a tuple of its positional arguments, or one "
            "tensor; what is one argument and no tensor goes into a tuple: (x,)."
        )

    def aligned(self, batch: Any) -> Any:
        """The batch with its labels in the places of the outputs that they are compared with.

        Where the model shifts ``labels``, of shape (…, sequence), it has ``shift_labels`` beside
        them; so any part of the sequence has the labels of its outputs.
        """
        labels = batch.get("labels") if self.shifts_labels and isinstance(batch, Mapping) else None
        if not isinstance(labels, torch.Tensor) or labels.ndim < 2 or "shift_labels" in batch:
            return batch
        shifted = torch.nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORE_INDEX)
        return {**batch, "shift_labels": shifted}

    def count(self, batch: Any) -> float | None:
        """The items that the mean is over; ``None``: its samples.

        Raises:
            ConfigError: ``num_items`` gives no number.
        """
        given = None if self.num_items is None else self.num_items(batch)
        if given is None:
            return None
        number = given.item() if isinstance(given, torch.Tensor) and given.numel() == 1 else given
        if isinstance(number, Real) and 0 <= number < math.inf:
            return float(number)
        raise ConfigError(
            f"the objective's num_items(batch) gave {given!r:.80}. Return how many items of the "
            "batch the loss is a mean of: a number from 0."
        )

    def loss_of(self, output: Any, batch: Any, count: float | None) -> Loss:
        """The loss of the model's output.

        Args:
            output: of the model, called with :meth:`arguments`.
            batch: what ``loss`` takes beside it.
            count: from :meth:`count`.

        Raises:
            ConfigError: a count is given twice.
        """
        loss = self.loss(output, batch)
        if count is None or not isinstance(loss, (torch.Tensor, LossSum)):
            return loss
        if isinstance(loss, LossSum):
            raise ConfigError(
                "the objective's loss(output, batch) returned a LossSum, which has its own count, "
                "and there is num_items too. Leave num_items out, or return the mean."
            )
        return LossSum(loss * count if count else _nothing(loss, output), count)


@dataclass(frozen=True)
class _OwnLoss(Objective):
    """The objective of a model that should compute its own loss, since none was given."""

    model: Any = None

    def call(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model with the batch.

        Raises:
            ConfigError: its ``forward`` does not take the batch.
        """
        try:
            return model(*args, **kwargs)
        except TypeError as error:
            self._explain(error, model, args, kwargs)
            raise

    @contextlib.contextmanager
    def calling(self, batch: Any) -> Iterator[None]:
        """Do as :meth:`call` where a schedule calls the model."""
        try:
            yield
        except TypeError as error:
            self._explain(error, self.model, *self.arguments(batch))
            raise

    def _explain(
        self, error: TypeError, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        # Any other one is the model's own, and shown as it is.
        if was_refused(model, error, args, kwargs):
            raise ConfigError(
                f"no loss was given, so the model was called with what is in the batch, "
                f"{_as_called(args, kwargs)}, which its forward does not take: {error}. "
                f"{_PASS_ONE} It is left out only for a model whose output has `.loss`; make "
                "batches of its arguments then: a mapping by their names, or a tuple."
            ) from error


def require_objective(given: Any) -> Objective:
    """Return the objective that a pipeline needs.

    Raises:
        ConfigError: it is a plain function.
    """
    if isinstance(given, Objective):
        return given
    raise ConfigError(
        "a loss or predict function that calls the model was given, and under pipeline parallelism "
        "no process can call it: the first stage needs what goes into the model, and the last one "
        f"what to make of the output. Give them apart: loss={_EXAMPLE}. Leave loss out if the "
        "model's output has .loss (without fit: unipar.Objective.of_model(model)). For predict, "
        "the second part returns (predictions, targets)."
    )


def _nothing(loss: torch.Tensor, output: Any) -> torch.Tensor:
    """Zero, of the same graph, so that collectives of a backward pass have their counterparts.

    A mean over no item is NaN, and so may be its gradient.
    """
    # Not public in torch 2.13 (torch/utils/_pytree.py); transformers has its outputs known there.
    for leaf in _pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            leaf.register_hook(torch.zeros_like)
    no = torch.zeros_like(loss, dtype=torch.bool)
    return torch.where(no, loss, torch.zeros_like(loss))


# -- models that compute their own loss ----------------------------------------------------------

_SHIFTING = ("ForCausalLM", "LMHeadModel")
_SHIFTING_TYPES = ("ForCausalLM", "ForConditionalGeneration")
_NOT_SHIFTING = (
    *("BartForCausalLM", "BigBirdPegasusForCausalLM", "BlenderbotForCausalLM"),
    *("BlenderbotSmallForCausalLM", "FlaubertWithLMHeadModel", "MBartForCausalLM"),
    *("MarianForCausalLM", "MvpForCausalLM", "PLBartForCausalLM", "PegasusForCausalLM"),
    *("ProphetNetForCausalLM", "TrOCRForCausalLM", "WhisperForCausalLM"),
    *("XLMWithLMHeadModel", "XLNetLMHeadModel"),
)
"""Whose labels are shifted already, in transformers 5.23: mostly decoders of two-part models."""


def _without_wrappers(model: Any) -> Any:
    """The model that computes the loss, without what is around it."""
    while True:
        children = dict(model.named_children()) if isinstance(model, nn.Module) else {}
        if isinstance(model, nn.ModuleList) and len(model):
            # The stages of a pipeline are copies of the model, without the layers of other stages.
            inner: Any = model[0]
        elif "_orig_mod" in children:
            # A compiler's.
            inner = children["_orig_mod"]
        elif getattr(model, "module", None) is not None:
            # DDP's and its like.
            inner = model.module
        elif callable(base := getattr(model, "get_base_model", None)):
            # PEFT's.
            inner = base()
        elif len(children) == 1 and not _shifts_labels(model):
            # The user's own, around a model that tells what it is.
            (inner,) = children.values()
            own = next(model.parameters(recurse=False), None)
            if own is not None or "config" not in vars(inner) or "config" in vars(model):
                break
        else:
            break
        if inner is model:
            break
        model = inner
    return model


def _shifts_labels(module: Any) -> bool:
    """Whether the model predicts a label from the tokens before it, and none by the first."""
    config = getattr(module, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        return False
    names = {cls.__name__ for cls in type(module).__mro__}
    names |= {*(getattr(config, "architectures", None) or ())}
    if not names.isdisjoint(_NOT_SHIFTING):
        return False
    # What transformers' Trainer goes by (trainer.py of 5.23, `_loss_shifts_labels`).
    kind = getattr(module, "loss_type", None)
    return kind in _SHIFTING_TYPES or any(name.endswith(_SHIFTING) for name in names)


def _classifies(model: Any) -> bool:
    """Return whether integer labels are classes, of which -100 is none, and not numbers."""
    config = getattr(model, "config", None)
    one = "ForSequenceClassification" in type(model).__name__
    single = one and getattr(config, "num_labels", None) == 1
    return not single and getattr(config, "problem_type", None) != "regression"


_PASS_ONE = (
    "Pass loss=f with f(model, batch) -> scalar tensor or unipar.LossSum, such as loss=lambda "
    "model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]), or a unipar.Objective."
)


def _as_called(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Describe a call, as in ``model(Tensor, mask=Tensor)``."""
    given = [type(one).__name__ for one in args]
    given += [f"{name}={type(one).__name__}" for name, one in kwargs.items()]
    shown = given if len(given) <= 8 else [*given[:8], "…"]
    return f"model({', '.join(shown)})"


def _whole_batch(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return batch
    return tuple(batch) if isinstance(batch, (list, tuple)) else (batch,)


def _loss_of_output(output: Any, batch: Any) -> Any:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise ConfigError(
            f"no loss was given, and the model's output ({type(output).__name__}) has no `.loss`. "
            f"{_PASS_ONE}"
        )
    return loss


def _num_labels(batch: Any, *, shifts: bool) -> int | None:
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, torch.Tensor) or not labels.dim() or labels.is_floating_point():
        return None
    if isinstance(shifted := batch.get("shift_labels"), torch.Tensor):
        labels = shifted
    elif shifts and labels.dim() > 1:
        labels = labels[..., 1:]
    return int((labels != IGNORE_INDEX).sum())
