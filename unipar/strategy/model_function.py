"""A model as a user gives it: as a module, or as a function that builds one where it will be."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from unipar.layout import Layout


@dataclass(frozen=True)
class ModelContext:
    """The place of a model, for a model function that takes an argument.

    Attributes:
        layout: how the processes of the run are arranged.
        stage: of a pipeline, the one that this process has, from 0.
        device: where the strategy will move the model; building it there saves nothing.
    """

    layout: Layout
    stage: int
    device: torch.device


ModelFactory = Callable[[], nn.Module] | Callable[[ModelContext], nn.Module]


def takes_context(function: ModelFactory) -> bool:
    """Return whether a model function has one parameter, without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # Some built-in functions have none.
        return False
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.default is p.empty and p.kind in places]
    return len(needed) == 1


def build_model(function: ModelFactory, context: ModelContext | None = None) -> nn.Module:
    """Build a model by a user's function.

    Args:
        function: the user's.
        context: given to it, if it takes an argument; left out: of one process, on the host.
    """
    build: Callable[..., nn.Module] = function
    if not takes_context(function):
        return build()
    return build(context or ModelContext(Layout(), 0, torch.device("cpu")))
