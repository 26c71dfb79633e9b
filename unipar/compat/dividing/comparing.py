"""Whether what a model computes of parts of a batch makes what it computes of the whole."""

from __future__ import annotations

from typing import Any

import torch

from unipar.compat.dividing.cutting import ALIKE, LOSS, Output
from unipar.compat.dividing.runs import KEEPS, Run
from unipar.compat.dividing.shares import Shares, part_of
from unipar.data.move import with_items

RELATED = (
    "it sets the samples of a batch in relation to each other, or they do not lie along the first "
    "or second dimension of its first input"
)
UNFIT = (
    "the shapes of what it gives depend on the values of what it is given, as where it cuts "
    "sequences at the longest of a batch (pad_packed_sequence does, without total_length)"
)


def compared(whole: Run, part: Run, shares: Shares, rounding: float) -> tuple[list[Output], str]:
    """How outputs of a part are found in those of the whole; or why they are not."""
    if any(isinstance(leaf, (bool, int, float)) for leaf in _numbers(whole.rest)):
        # It may be made of samples, and is the same by chance.
        return [], "it gives a number beside tensors, which may be one of its samples"
    if len(whole.outputs) != len(part.outputs) or not _same(whole.rest, part.rest):
        return [], RELATED
    outputs = []
    for one, own in zip(whole.outputs, part.outputs, strict=True):
        found = _output(one, own, shares, rounding)
        if isinstance(found, str):
            return [], found
        outputs.append(found)
    for name, moved in whole.buffers.items():
        if name not in part.buffers or not _alike(part.buffers[name], moved, rounding):
            return [], f"{KEEPS} in buffers ({name})"
    for name in whole.stored.keys() | part.stored.keys():
        both = whole.stored.get(name, []), part.stored.get(name, [])
        pairs = zip(*both, strict=False)
        if len(both[0]) != len(both[1]) or not all(close(*pair, rounding) for pair in pairs):
            return [], f"{KEEPS} in attributes ({name})"
    return outputs, ""


def _alike(
    one: tuple[torch.Tensor | None, torch.Tensor],
    other: tuple[torch.Tensor | None, torch.Tensor],
    rounding: float,
) -> bool:
    """Whether two buffers, which were the same before, have moved alike."""
    (before, now), (_, expected) = one, other
    if now.dtype == expected.dtype and torch.equal(now, expected):
        # Masks are infinite, of which there are no differences.
        return True
    if before is None or before.shape != now.shape or not now.is_floating_point():
        return close(now, expected, rounding)
    moved = (expected.double() - before.double()).abs().max() if now.numel() else 0.0
    least = 3e-7 * expected.double().abs().max() if now.numel() else 0.0
    apart = (now.double() - expected.double()).abs().max() if now.numel() else 0.0
    return now.dtype == expected.dtype and bool(apart <= rounding * moved + least)


def _same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (ValueError, RuntimeError, TypeError):
        return False


def _numbers(value: Any) -> list[Any]:
    found: list[Any] = []

    def note(one: Any) -> Any:
        if isinstance(one, (bool, int, float)):
            found.append(one)
        return one if isinstance(one, (bool, int, float, str)) else with_items(one, note)

    note(value)
    return found


def _output(
    whole: torch.Tensor, part: torch.Tensor, shares: Shares, rounding: float
) -> Output | str:
    if whole.dim() != part.dim() or whole.dtype != part.dtype:
        return RELATED
    unlike = [dim for dim, (a, b) in enumerate(zip(whole.shape, part.shape, strict=True)) if a != b]
    if not unlike:
        if whole.dim() == 0 and whole.is_floating_point():
            return Output(LOSS)
        # What is made of samples may be the same by chance.
        return Output(ALIKE) if part.is_leaf and part.requires_grad else RELATED
    each, rest = divmod(whole.shape[unlike[0]], sum(shares.sizes))
    if len(unlike) > 1 or rest or part.shape[unlike[0]] != each * shares.own:
        return UNFIT
    own = part_of(whole, unlike[0], shares.times(each))
    return Output(unlike[0], each) if close(part, own, rounding) else RELATED


def close(one: torch.Tensor, other: torch.Tensor, rounding: float) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point() and not one.is_complex():
        return torch.equal(one, other)
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.detach().to(wide), other.detach().to(wide)
    both = torch.isfinite(one) & torch.isfinite(other)
    if not torch.equal(one[~both].nan_to_num(), other[~both].nan_to_num()):
        return False
    if not both.any():
        return True
    sizes = other[both].abs()
    # Masks by huge numbers say nothing of the others.
    usual = sizes[sizes <= 1e4 * (sizes.median() + 1e-30)]
    scale = usual.max() if usual.numel() else sizes.max()
    return bool(((one - other)[both].abs() <= rounding * torch.maximum(sizes, scale)).all())
