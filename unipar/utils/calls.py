"""Calls of a model that its ``forward`` does not take."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import CodeType
from typing import Any

from torch import nn


def was_refused(
    model: Any, error: TypeError, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Return whether a call failed because ``forward`` takes other arguments, and not within it.

    Args:
        model: what was called, wrapped or not.
        error: what the call has raised.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    called = _under_wrappers(model)
    forward = called.forward if isinstance(called, nn.Module) else called
    if (signature := _signature(forward)) is None:
        return False
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        # A hook may have changed the arguments into some that it does take.
        return getattr(inspect.unwrap(forward), "__code__", None) not in _codes(error)
    return False


def _under_wrappers(model: Any) -> Any:
    """The module that is handed the arguments by wrappers that pass on whatever they get."""
    if isinstance(model, nn.ModuleList) and len(model):
        # The stages of a pipeline, each of which is called as the whole model is.
        model = model[0]
    while isinstance(model, nn.Module) and _takes_all(model.forward):
        # DistributedDataParallel, DeepSpeedEngine and others; torch.compile.
        inner = getattr(model, "module", None) or getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module) or inner is model:
            break
        model = inner
    return model


def _takes_all(function: Any) -> bool:
    if (signature := _signature(function)) is None:
        return False
    kinds = {one.kind for one in signature.parameters.values()}
    return kinds == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def _signature(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # Of functions that are written in C.
        return None


def _codes(error: BaseException) -> set[CodeType]:
    """The functions that an error came through."""
    codes, trace = set(), error.__traceback__
    while trace is not None:
        codes.add(trace.tb_frame.f_code)
        trace = trace.tb_next
    return codes
