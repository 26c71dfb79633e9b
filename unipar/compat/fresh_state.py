"""State that optimizers have before training: what a constructor makes, as Adagrad's does."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from unipar.compat.readable import are_equal
from unipar.engine.divisions import constructor_arguments


def may_begin(
    optimizer: Optimizer,
    group: dict[str, Any],
    parameter: nn.Parameter,
    new: nn.Parameter,
    divides: bool,
) -> bool:
    """Let an optimizer update another parameter; false where its state would be lost.

    What a constructor makes, as Adagrad's does, is not what training has made: it is made anew.

    Args:
        optimizer: the user's.
        group: of it, which has the parameter.
        parameter: what it was built over.
        new: what takes its place, which may be the same.
        divides: whether the strategy begins another state, of parts.
    """
    state = optimizer.state.get(parameter)
    if not state or (new is parameter and not divides):
        return True
    begun, made = _as_built(optimizer, group, parameter), _as_built(optimizer, group, new)
    if made is None or not are_equal(begun, state):
        return False
    if new is not parameter:
        del optimizer.state[parameter]
        optimizer.state[new] = made
    return True


def _as_built(
    optimizer: Optimizer, group: dict[str, Any], parameter: nn.Parameter
) -> dict[str, Any] | None:
    """The state that a constructor makes of a parameter; ``None`` where that is not known."""
    kind: Any = type(optimizer)
    own = {key: value for key, value in group.items() if key != "param_names"}
    try:
        fresh = kind([{**own, "params": [parameter]}], **constructor_arguments(optimizer))
    except Exception:
        # A script's own class may take anything, and raise anything.
        return None
    return dict(fresh.state[parameter]) if parameter in fresh.state else None
