"""Putting ranks' parts together, and measuring how far two runs are apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from unipar.testing.harness import Exported, Part
from unipar.testing.reference import Trace


@dataclass(frozen=True)
class Difference:
    """How far a run is from the reference, relative to the reference.

    Attributes:
        loss: the largest ``|a - b| / |b|`` over the steps.
        grad_norm: likewise, over the steps that have one.
        weights: the largest over the tensors of ``max|a - b| / max|b|`` (maximum norms, so one
            small element of a tensor does not decide).
    """

    loss: float = 0.0
    grad_norm: float = 0.0
    weights: float = 0.0

    @property
    def largest(self) -> float:
        return max(self.loss, self.grad_norm, self.weights)

    def __or__(self, other: Difference) -> Difference:
        return Difference(**{k: max(v, getattr(other, k)) for k, v in asdict(self).items()})

    def __str__(self) -> str:
        return f"loss {self.loss:.1e}, grad norm {self.grad_norm:.1e}, weights {self.weights:.1e}"


def relative(value: float | None, expected: float | None) -> float:
    if value is None or expected is None:
        return 0.0 if value is expected else math.inf
    if math.isnan(expected):
        return 0.0 if math.isnan(value) else math.inf
    return _ratio(abs(value - expected), abs(expected))


def relative_tensors(value: torch.Tensor, expected: torch.Tensor) -> float:
    if value.shape != expected.shape:
        return math.inf
    if expected.numel() == 0:
        return 0.0
    value, expected = value.double(), expected.double()
    return _ratio((value - expected).abs().max().item(), expected.abs().max().item())


def _ratio(difference: float, scale: float) -> float:
    if math.isnan(difference):
        return math.inf
    if difference == 0.0:
        return 0.0
    return difference / scale if scale else math.inf


def difference(run: Trace, expected: Trace) -> Difference:
    """Compare what both traces hold. Lengths and names must agree, and are checked elsewhere."""
    return Difference(
        max(map(relative, run.losses, expected.losses), default=0.0),
        max(map(relative, run.grad_norms, expected.grad_norms), default=0.0),
        max(
            (relative_tensors(run.weights[n], t) for n, t in expected.weights.items()), default=0.0
        ),
    )


def assert_equal_runs(
    run: Trace, expected: Trace, tolerance: float, *, subject: str = "the run"
) -> Difference:
    """Raise AssertionError, naming the step or the tensor, unless the runs are the same.

    Items, skipped steps and learning rates have to agree exactly; losses, gradient norms and
    weights within the tolerance (see :class:`Difference`).
    """
    assert_told_alike(run, expected, subject=subject)
    _assert_steps("gradient norm", run.grad_norms, expected.grad_norms, tolerance, subject)
    _assert_steps("loss", run.losses, expected.losses, tolerance, subject)
    assert_equal_weights(run.weights, expected.weights, tolerance, subject=subject)
    return difference(run, expected)


def assert_told_alike(run: Trace, expected: Trace, *, subject: str = "the run") -> None:
    """Raise AssertionError unless all that no precision can change is the same."""
    if len(run.losses) != len(expected.losses):
        raise AssertionError(
            f"{subject} took {len(run.losses)} steps, the reference {len(expected.losses)}"
        )
    _assert_exact("number of items", run.num_items, expected.num_items, subject)
    _assert_exact("skipped flag", run.skipped, expected.skipped, subject)
    _assert_steps(
        "learning rate", [r[0] for r in run.lrs], [r[0] for r in expected.lrs], 1e-9, subject
    )
    _assert_exact("learning rates", _rounded(run.lrs), _rounded(expected.lrs), subject)
    _assert_alike_weights(run.weights, expected.weights, subject)


def assert_equal_weights(
    weights: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    tolerance: float,
    *,
    subject: str = "the run",
) -> None:
    _assert_alike_weights(weights, expected, subject)
    for name, tensor in expected.items():
        apart = relative_tensors(weights[name], tensor)
        if not apart <= tolerance:
            raise AssertionError(
                f"{subject}: the weight {name} differs from the reference by {apart:.1e} "
                f"(relative); allowed: {tolerance:g}"
            )


def _assert_alike_weights(
    weights: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], subject: str
) -> None:
    if weights.keys() != expected.keys():
        raise AssertionError(
            f"{subject} has other weights than the reference: "
            f"{sorted(weights.keys() - expected.keys())} are too many and "
            f"{sorted(expected.keys() - weights.keys())} are missing"
        )
    for name, tensor in expected.items():
        if weights[name].dtype != tensor.dtype:
            raise AssertionError(
                f"{subject}: {name} is {weights[name].dtype}, and {tensor.dtype} in the reference"
            )


def _assert_steps(
    what: str,
    values: Sequence[float | None],
    expected: Sequence[float | None],
    tolerance: float,
    subject: str,
) -> None:
    for step, (value, reference) in enumerate(zip(values, expected, strict=True), start=1):
        apart = relative(value, reference)
        if not apart <= tolerance:
            raise AssertionError(
                f"{subject}: the {what} of step {step} is {value}, and {reference} in the "
                f"reference: {apart:.1e} apart (relative); allowed: {tolerance:g}"
            )


def _assert_exact(what: str, values: Sequence, expected: Sequence, subject: str) -> None:
    for step, (value, reference) in enumerate(zip(values, expected, strict=True), start=1):
        if value != reference:
            raise AssertionError(
                f"{subject}: the {what} of step {step} is {value}, and {reference} in the reference"
            )


def _rounded(rates: Sequence[tuple[float, ...]]) -> list[tuple[float, ...]]:
    return [tuple(float(f"{rate:.9g}") for rate in step) for step in rates]


def assemble(parts: Sequence[Sequence[Part]]) -> dict[str, torch.Tensor]:
    """Whole tensors from what each rank holds of them.

    Raises:
        AssertionError: ranks name different tensors, a tensor is not covered, or two ranks that
            hold the same part of it hold different values.
    """
    whole: dict[str, torch.Tensor] = {}
    for held in zip(*parts, strict=True):
        names = {part.name for part in held}
        if len(names) > 1:
            raise AssertionError(f"ranks export different tensors in one place: {sorted(names)}")
        name = held[0].name
        whole[name] = torch.zeros(held[0].shape, dtype=held[0].dtype)
        covered = torch.zeros(held[0].shape, dtype=torch.bool)
        for rank, part in enumerate(held):
            for box, tensor in zip(part.boxes, part.tensors, strict=True):
                where = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
                known = covered[where]
                if not torch.equal(whole[name][where][known], tensor[known]):
                    raise AssertionError(
                        f"rank {rank} holds other values of {name} than ranks before"
                    )
                whole[name][where] = tensor
                covered[where] = True
        if not covered.all():
            raise AssertionError(f"no rank holds {(~covered).sum()} elements of {name}")
    return whole


def assemble_weights(exported: Sequence[Exported]) -> dict[str, torch.Tensor]:
    """All weights by all their names, those of tied ones included."""
    whole = assemble([state.weights for state in exported])
    return {**whole, **{name: whole[of] for name, of in exported[0].aliases.items()}}
