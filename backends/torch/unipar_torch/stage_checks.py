"""A cut held against numbers: in the first pass of training, nothing that counts may depend on what
stands in for other stages' tensors, and neighbors have to agree on what their blocks are given.

A stage is run twice on its first micro-batch, with the same random numbers: what is missing is not
a number in one, and a half in the other. A result that differs was computed from something that
another stage has. And beside the hidden state, which is sent, the next stage's first block is given
tensors (masks, rotary tables) that this stage and the next one both make: those are compared. So
each stage by itself computes what the whole model does, and no rank ever needs the whole.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_leaves

from unipar.errors import ConfigError, first_few
from unipar_torch.stage_modules import Stage

TOLERANCE = 1e-3
"""The largest difference that is rounding, relative to the largest element of a tensor."""
NUM_COMPARED = 24
"""Tensors beside the hidden state that neighbors compare."""
_REMEDY = (
    "Name the parts of each stage by stages=[[…], […]]; what two stages need is named in both, and "
    "is kept equal. Or use dp_shard, which divides any model."
)


def run_checked(
    stage: Stage, args: tuple[Any, ...], kwargs: dict[str, Any], received: torch.Tensor | None
) -> Any:
    """The stage's first pass, and a second one that has to agree with it.

    Returns:
        What the first pass gives.

    Raises:
        ConfigError: the stage cannot run without the others' tensors, depends on them, or changes
            its weights.
    """
    weights = list(stage.module.parameters())
    versions = [weight._version for weight in weights]
    with _repeatable(stage) as begin_again:
        with stage.standing_in(math.nan):
            output = _run(stage, args, kwargs, received)
        seen = stage.entered, stage.others
        begin_again()
        with stage.standing_in(0.5):
            again = _run(stage, args, kwargs, received)
        if _differ(output, again):
            raise ConfigError(_culprits(stage, args, kwargs, received, again, begin_again))
    if [weight._version for weight in weights] != versions:
        raise ConfigError(
            f"mesh: {stage.name} changes weights in its forward pass, which pp runs twice for its "
            "first micro-batch. Change them after a step, or use strategy='ddp'."
        )
    stage.entered, stage.others = seen
    return output


def digest(others: Any) -> list[float]:
    """Numbers by which neighbors compare what a block is given beside the hidden state.

    Of lists and mappings their structure; of each tensor its sum, and that of magnitudes. Objects
    of other classes (caches) are left out.
    """
    leaves, structure = tree_flatten(others)
    numbers = [float(zlib.crc32(str(structure).encode()))]
    for leaf in _compared(leaves):
        values = torch.as_tensor(leaf).detach().double()
        numbers += [values.sum().item(), values.abs().sum().item()]
    return numbers


def compare(stage: Stage, sent: list[float]) -> None:
    """Hold what the stage before has given a block against what this one has.

    Args:
        stage: after a pass.
        sent: the digest of the stage before.

    Raises:
        ConfigError: they differ.
    """
    own = digest(stage.entered)
    places = [
        keystr(path)
        for path, leaf in tree_flatten_with_path(stage.entered)[0]
        if isinstance(leaf, torch.Tensor | float | int)
    ]
    block = stage.plan.blocks(stage.index)[0]
    same = own[0] == sent[0] and len(own) == len(sent)
    apart = "arguments of another structure"
    for number, place in enumerate(places[:NUM_COMPARED] if same else []):
        pairs = zip(own[1 + 2 * number :][:2], sent[1 + 2 * number :][:2], strict=True)
        if not all(a == b or math.isclose(a, b, rel_tol=TOLERANCE) for a, b in pairs):
            same, apart = False, f"another {place} (of its args, kwargs)"
            break
    if not same:
        raise ConfigError(
            f"mesh: {stage.name} cannot begin before '{block}': beside the hidden state, which is "
            f"sent, that block is given {apart} on this stage than on the one before. So it is "
            f"made from what earlier layers have computed, and pp hands on one tensor. {_REMEDY}"
        )


def _compared(leaves: list[Any]) -> list[Any]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor | float | int)][:NUM_COMPARED]


def _run(
    stage: Stage, args: tuple[Any, ...], kwargs: dict[str, Any], received: torch.Tensor | None
) -> Any:
    try:
        return stage.run(args, kwargs, received)
    except ConfigError:
        raise
    except Exception as error:
        if stage.is_first:
            raise
        raise ConfigError(
            f"mesh: {stage.name} of the model cannot run by itself: with the other stages' layers "
            f"passed by it raises {type(error).__name__} ({error}). {_REMEDY}"
        ) from error


@contextlib.contextmanager
def _repeatable(stage: Stage) -> Iterator[Any]:
    """Gives what takes random numbers and buffers back to the beginning; ends after one pass."""
    device = stage.device
    cuda = device.type == "cuda"

    def state() -> tuple[Any, ...]:
        numbers = torch.get_rng_state(), torch.cuda.get_rng_state(device) if cuda else None
        return (*numbers, [buffer.clone() for buffer in stage.module.buffers()])

    def put(kept: tuple[Any, ...]) -> None:
        torch.set_rng_state(kept[0])
        if cuda:
            torch.cuda.set_rng_state(kept[1], device)
        for buffer, value in zip(stage.module.buffers(), kept[2], strict=True):
            # A backward pass to come takes no change of these, which is none in the end.
            buffer.data.copy_(value)

    begin = state()
    after: list[tuple[Any, ...]] = []

    def begin_again() -> None:
        if not after:
            after.append(state())
        put(begin)

    yield begin_again
    put(after[0])


def _differ(one: Any, other: Any) -> bool:
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=False)
    return len(tree_leaves(one)) != len(tree_leaves(other)) or any(
        _apart(a.detach(), b.detach())
        for a, b in pairs
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    )


def _apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return True
    one, other = one.double(), other.double()
    largest = other[other.isfinite()].abs().amax() if other.isfinite().any() else 1.0
    return not torch.allclose(
        one, other, rtol=TOLERANCE, atol=TOLERANCE * float(largest), equal_nan=True
    )


def _culprits(
    stage: Stage,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    received: torch.Tensor | None,
    expected: Any,
    begin_again: Any,
) -> str:
    """Say which of the missing tensors the stage depends on."""
    found: list[str] = []
    for name, one in stage.stand_ins.items():
        if not one.is_floating_point():
            continue
        begin_again()
        with stage.standing_in(0.5):
            one.fill_(math.nan)
            if _differ(stage.run(args, kwargs, received), expected):
                found.append(name)
    what = (
        f"{first_few(found)}, which other stages have"
        if found
        else "what blocks of earlier stages give, other than by the hidden state"
    )
    return (
        f"mesh: the cut ({stage.plan.source}) changes what the model computes: {stage.name} needs "
        f"{what}. {_REMEDY}"
    )
