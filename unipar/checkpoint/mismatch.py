"""Saying how a model and a checkpoint differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unipar.checkpoint.manifest import TensorIndex
from unipar.errors import CheckpointError, did_you_mean
from unipar.state import TensorState

_SHOWN = 8


def check_names(
    states: Sequence[TensorState], stored: Mapping[str, TensorIndex], *, strict: bool
) -> None:
    """Hold that what is asked for is stored, in the same shape.

    Args:
        states: what is asked for.
        stored: what there is.
        strict: whether what is stored must be asked for, too.

    Raises:
        CheckpointError: lists what is missing, left over, or of another shape.
    """
    asked = {state.name for state in states}
    missing = [state for state in states if state.name not in stored]
    left = [name for name in stored if name not in asked] if strict else []
    other = [s for s in states if s.name in stored and tuple(s.shape) != stored[s.name].shape]
    if not (missing or left or other):
        return
    lines = [f"the checkpoint does not fit: of {len(stored)} stored and {len(asked)} tensors here,"]
    lines += _listing(
        "are not in the checkpoint",
        [f"{s.name} {list(s.shape)}{did_you_mean(s.name, left)}" for s in missing],
    )
    lines += _listing(
        "are in the checkpoint only", [f"{name} {list(stored[name].shape)}" for name in left]
    )
    lines += _listing(
        "differ in shape",
        [f"{s.name}: stored {list(stored[s.name].shape)}, here {list(s.shape)}" for s in other],
    )
    lines.append("Build the model with the same layers and sizes as the saved one.")
    raise CheckpointError("\n".join(lines))


def _listing(what: str, items: Sequence[str]) -> list[str]:
    if not items:
        return []
    more = [f"    … and {len(items) - _SHOWN} more"] if len(items) > _SHOWN else []
    return [f"  {len(items)} {what}:", *(f"    {item}" for item in items[:_SHOWN]), *more]
