"""Functions that a user gives: whether they can be called as they will be."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from unipar.errors import ConfigError


def check_function(given: Any, name: str, parameters: tuple[str, ...]) -> None:
    """Refuse what cannot be called with these arguments, by their places."""
    wanted = f"{name}({', '.join(parameters)})"
    if not callable(given) or isinstance(given, nn.Module):
        also = ""
        if isinstance(given, nn.Module):
            also = (
                " It is called with the model, which it calls: model(batch[0])."
                if "model" in parameters
                else " It gets the whole batch, and may call a module: module(output, batch[1])."
            )
        raise ConfigError(f"{name} is {described(given)}. Pass a function {wanted}.{also}")
    try:
        signature = inspect.signature(given)
    except (TypeError, ValueError):  # Some built-in functions have none.
        return
    try:
        signature.bind(*parameters)
    except TypeError as error:
        raise ConfigError(
            f"{name} is {described(given)} of {signature}, and is called as {wanted}: {error}."
        ) from error


def described(given: Any) -> str:
    """Describe what a user gave."""
    if inspect.isclass(given):
        return f"the class {given.__name__}"
    return "a function" if inspect.isroutine(given) else f"a {type(given).__name__}"
