"""Whether what a model computes of parts of a batch makes what it computes of the whole."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from fractions import Fraction
from typing import Any

import torch

from unipar.compat.dividing.cutting import ALIKE, LOSS, Output
from unipar.compat.dividing.runs import KEEPS, Run
from unipar.compat.dividing.shares import Shares, part_of
from unipar.data.move import with_items
from unipar.engine.snapshots import Change
from unipar.errors import first_few

RELATED = (
    "it sets the samples of a batch in relation to each other, or they do not lie along the first "
    "or second dimension of its first input"
)
UNFIT = (
    "the shapes of what it gives depend on the values of what it is given, as where it cuts "
    "sequences at the longest of a batch (pad_packed_sequence does, without total_length)"
)


def compared(
    whole: Run, part: Run, shares: Shares, rounding: float, unsteady: Collection[str]
) -> tuple[list[Output], str]:
    """How outputs of a part are found in those of the whole; or why they are not.

    Args:
        whole: the run of all samples.
        part: that of this rank's.
        shares: how samples are divided.
        rounding: up to which differences are none.
        unsteady: paths of what is another in each run, of whatever samples.
    """
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
    unlike = [path for path in unlike_in(whole, part, rounding) if path not in unsteady]
    return outputs, kept(whole) or kept(part) or _kept_in(unlike)


def kept(run: Run) -> str:
    """Why what a run has stored is of its batch, as far as that shows without another run.

    A number that was read of a tensor may be the same by chance, and what has a gradient may be a
    part of a loss; masks for sequences of a length may be the same of whatever is computed.
    """
    read = set(map(id, run.read))
    return _kept_in([
        path for path, (_, now) in run.stored.items()
        if id(now) in read
        or (isinstance(now, torch.Tensor) and (not now.dim() or now.requires_grad))
    ])  # fmt: skip


def unlike_in(one: Run, other: Run, rounding: float) -> list[str]:
    """Paths of what two runs, before which all was the same, have stored otherwise."""
    unlike = []
    for path in {**one.stored, **other.stored}:
        there = one.stored.get(path) or other.stored[path]
        unmoved = Change(there.before, there.before)
        pair = one.stored.get(path, unmoved), other.stored.get(path, unmoved)
        if not _stored_alike(pair[0], pair[1], rounding):
            unlike.append(path)
    return unlike


def gave_alike(one: Run, other: Run, rounding: float) -> bool:
    """Whether two runs on one batch, before which all was the same, gave the same."""
    return len(one.outputs) == len(other.outputs) and all(
        close(*pair, rounding) for pair in zip(one.outputs, other.outputs, strict=True)
    )


def _kept_in(paths: list[str]) -> str:
    # Of what is in a list, or by numbers in a dict, that is named.
    names = dict.fromkeys(re.sub(r"(\[\d*\])+$", "", path) for path in paths)
    return f"{KEEPS} in attributes ({first_few(list(names))})" if names else ""


def _stored_alike(one: Change, other: Change, rounding: float) -> bool:
    now, expected = one.after, other.after
    if isinstance(now, torch.Tensor) and isinstance(expected, torch.Tensor):
        pair = [(b if isinstance(b, torch.Tensor) else None, a) for b, a in (one, other)]
        return _alike(pair[0], pair[1], rounding)
    if isinstance(now, torch.Tensor) or isinstance(expected, torch.Tensor):
        return False
    if isinstance(now, float) and isinstance(expected, float) and now != expected:
        moved = expected - one.before if isinstance(one.before, (int, float)) else expected
        # Numbers are as exact as the machine's, and counts of samples may be large.
        near = abs(now - expected) <= rounding * abs(moved) + 1e-12 * abs(expected)
        return near or (math.isnan(now) and math.isnan(expected))
    return _same(now, expected)


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
        if part.is_leaf and part.requires_grad:
            return Output(ALIKE)
        # What is made of samples may be the same by chance.
        return Output(LOSS) if whole.dim() == 0 and whole.is_floating_point() else RELATED
    each = Fraction(whole.shape[unlike[0]], sum(shares.sizes))
    if len(unlike) > 1 or part.shape[unlike[0]] != each * shares.own:
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
