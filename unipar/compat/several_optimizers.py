"""Several optimizers: whose models a loss trains, and what they do together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from unipar.compat.models import PreparedModel, led_to
from unipar.compat.optimizers import Kind, PreparedOptimizer
from unipar.errors import ConfigError


def trained_by(
    loss: torch.Tensor,
    optimizers: Iterable[Kind],
    model: PreparedModel | None = None,
) -> list[Kind]:
    """The optimizer of the model that a loss trains.

    Where it may be those of several models, all of them, if gradients of these are whole: as in
    PyTorch it is the steps that follow which decide.

    Args:
        loss: of the output of a model or more.
        optimizers: those that are prepared.
        model: what it trains, if the script says so.

    Raises:
        ConfigError: it was computed by none that has one, or not by the one that the script says.
    """
    trained = [one for one in optimizers if one.training is not None]
    if len(trained) == 1 and (model is None or model is trained[0].model):
        return trained
    found = [one for training in led_to([loss]) for one in trained if one.training is training]
    calls = PreparedOptimizer.calls if not trained else trained[0].calls
    if found and model is not None and all(one.model is not model for one in found):
        others = dict.fromkeys(_kind(one.model) for one in found)
        raise ConfigError(
            f"{calls.backward} was told that this loss trains a {_kind(model)}, and it was "
            f"computed by {' and '.join(others)} alone. Name the model, or the optimizer, of what "
            "the loss is to train."
        )
    if not found and not loss.requires_grad:
        raise ConfigError(
            f"{calls.backward}: this loss has no gradient. All that it was computed of is frozen, "
            "by requires_grad_(False), or it was computed under torch.no_grad(). Thaw what it is "
            "to train before the model is called."
        )
    if not found:
        raise ConfigError(
            "this loss was computed by no call of a model whose optimizer is prepared. Prepare the "
            f"model and its optimizer, {calls.optimized}, and call the model that this gives back; "
            "add what is made of weights alone, as a penalty is, to such a loss."
        )
    if all(one.lends_gradients for one in found):
        # Those that a script does not clear are added to, as in PyTorch.
        chosen = found
    else:
        # A GAN's loss of its generator goes through the critic, which only its own loss is to
        # train: the script clears the gradients of the one that it trains, or that comes first.
        named = [one for one in found if one.model is model]
        cleared = [one for one in found if one.cleared]
        chosen = (named or cleared or found)[:1]
    for one in found:
        if one not in chosen and one.training is not None:
            # The pass goes through DDP's hooks all the same.
            one.training.end_pass()
    for one in trained:
        one.cleared = one.stepped = False
        one.strayed |= one in found and one not in chosen
    return chosen


def _kind(model: PreparedModel | None) -> str:
    return "model" if model is None else type(model.module).__name__


def fetch_to_clip(optimizers: Sequence[PreparedOptimizer], call: str) -> None:
    """Have gradients be there for a function of torch's that clips them. Collective.

    Args:
        optimizers: of the models that they are of.
        call: what the script clips by.

    Raises:
        ConfigError: ranks have parts of them; or there was no backward pass.
    """
    if not all(one.lends_gradients for one in optimizers):
        raise ConfigError(
            f"{call}: this strategy divides gradients among ranks, and clips those of one whole "
            "model to a 2-norm above 0, once in a step. Use clip_grad_norm_(model.parameters(), "
            "max_norm), or a strategy that leaves gradients whole, such as ddp."
        )
    for one in optimizers:
        one.fetch_gradients()
