"""A loss function's one call of the model, taken out of it.

In a pipeline the model's inputs are needed on the first stage and its output exists on the last, so
that no process can call the whole model. Every stage therefore runs the loss function up to that
call, to learn its arguments; the last stage runs it once more, and answers the call with the
output.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from unipar.errors import ConfigError
from unipar.loss import LossFn
from unipar_colossalai.boosted import Boosted


class _Called(BaseException):
    """Leaves the loss function at its call; no ``except Exception`` of the user's holds it up."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


def arguments_of(loss_fn: LossFn, module: nn.Module, data: Any) -> dict[str, Any]:
    """What the loss function calls the model with, by the names of ``forward``.

    Raises:
        ConfigError: it does not call the model, or draws random numbers before it does.
    """
    signature = inspect.signature(type(module).forward)

    def called(*args: Any, **kwargs: Any) -> Any:
        raise _Called(dict(signature.bind(module, *args, **kwargs).arguments))

    before = torch.get_rng_state()
    try:
        loss_fn(Boosted(module, called), data)
    except _Called as call:
        if not torch.equal(before, torch.get_rng_state()):
            raise ConfigError(
                "colossalai: the loss function draws random numbers before it calls the model, and "
                "the stages of a pipeline would draw different ones. Draw them in the dataset, or "
                "set pp_size=1."
            ) from None
        arguments = call.arguments
        arguments.pop(next(iter(signature.parameters)))
        for parameter in signature.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                arguments.update(arguments.pop(parameter.name, {}))
        return arguments
    raise ConfigError(
        "colossalai: the loss function returns without a call of the model. With pp_size > 1 it "
        "has to call model(...) exactly once."
    )


def answering(module: nn.Module, output: Any) -> nn.Module:
    """A model that answers one call, whatever the arguments, with ``output``.

    A second call raises a ConfigError.
    """
    left = [output]

    def called(*args: Any, **kwargs: Any) -> Any:
        if not left:
            raise ConfigError(
                "colossalai: the loss function calls the model twice, and a pipeline takes each "
                "micro-batch through it once. Put both inputs into one batch, or set pp_size=1."
            )
        return left.pop()

    return Boosted(module, called)
