"""The result of a training step, which the device may still be computing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unipar.utils.host_copy import HostCopy


class StepResult:
    """The result of one training step; equal on every rank.

    The device may not have come to the end of the step yet. Then reading any of it waits until it
    is known that the step was taken, once for all: on an accelerator a run is faster that reads a
    result when the next step has begun.

    Args:
        loss: mean over all items of the global batch, before the update.
        num_items: how many items that is: samples, or the counts of :class:`LossSum`.
        grad_norm: 2-norm of the whole gradient before clipping, or a copy of it that is on its way
            to the host; ``None`` unless ``max_grad_norm`` is set.
        skipped: whether the optimizer did not step (fp16 overflow, or ``on_nan="skip"``).
        check: raises :class:`NonFiniteLossError` if the step was not taken, when that is known;
            left out: it is known.
    """

    __slots__ = ("_check", "_grad_norm", "_loss", "_num_items", "_skipped")

    def __init__(
        self,
        loss: float,
        num_items: float,
        grad_norm: float | HostCopy | None = None,
        skipped: bool = False,
        *,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._loss, self._num_items, self._skipped = loss, num_items, skipped
        self._grad_norm, self._check = grad_norm, check

    @property
    def loss(self) -> float:
        """Mean over all items of the global batch, before the update.

        Raises:
            NonFiniteLossError: the step was not taken, as for each of these.
        """
        self._settle()
        return self._loss

    @property
    def num_items(self) -> float:
        """How many items that is: samples, or the counts of :class:`LossSum`."""
        self._settle()
        return self._num_items

    @property
    def grad_norm(self) -> float | None:
        """2-norm of the whole gradient before clipping; ``None`` without ``max_grad_norm``."""
        self._settle()
        norm = self._grad_norm
        return norm.read() if isinstance(norm, HostCopy) else norm

    @property
    def skipped(self) -> bool:
        """Whether the optimizer did not step (fp16 overflow, or ``on_nan="skip"``)."""
        self._settle()
        return self._skipped

    @property
    def waits(self) -> bool:
        """Whether reading it may wait for a device; until it is read the same on every rank."""
        return isinstance(self._grad_norm, HostCopy) and self._grad_norm.waits

    def _settle(self) -> None:
        if self._check is not None:
            self._check()
            self._check = None

    def _read(self) -> tuple[float, float, float | None, bool]:
        return self.loss, self.num_items, self.grad_norm, self.skipped

    def __repr__(self) -> str:
        names = ("loss", "num_items", "grad_norm", "skipped")
        fields = (f"{name}={value!r}" for name, value in zip(names, self._read(), strict=True))
        return f"StepResult({', '.join(fields)})"

    def __eq__(self, other: object) -> bool:
        return self._read() == other._read() if isinstance(other, StepResult) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._read())

    def __reduce__(self) -> tuple[Any, ...]:
        return StepResult, self._read()
