"""The stepper: the part of a :class:`StepEngine` that clips and takes optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from unipar.engine.device_skipping import DeviceSkipping
from unipar.engine.precision import PrecisionPolicy
from unipar.state import is_dtensor
from unipar.utils.host_copy import HostCopy


class Update(NamedTuple):
    """The outcome of a step of the optimizer; equal on every rank.

    Attributes:
        norm: 2-norm of the whole gradient before clipping, which may be on its way to the host;
            ``None`` if it was not asked for.
        stepped: whether the weights changed.
        finite: whether the gradient was; where it was not, in fp16 the loss scale was too high.
            ``None``: only the device knows, and the weights have changed if ``norm`` is.
    """

    norm: HostCopy | float | None
    stepped: bool
    finite: bool | None = True


_STEPPED = Update(None, stepped=True)


class Stepper(Protocol):
    """Divides, clips and steps, once gradients are summed."""

    def step(self, divisor: float, max_norm: float | None, *, careful: bool) -> Update:
        """Divide the gradient, clip it, and update the weights by it. Collective.

        Args:
            divisor: what gradients are still to be divided by, the loss scale aside; 0 if the
                global batch has no item, and no mean.
            max_norm: the 2-norm to clip to; ``inf`` measures alone; ``None`` does neither.
            careful: whether to leave the weights as they are where the norm is not finite.
        """
        ...


class OptimizerStepper:
    """Steps a ``torch.optim`` optimizer.

    Args:
        optimizer: what steps.
        precision: what unscales and steps it.
        parameters: what has the gradients: whole parameters, or this rank's parts.
        total_norm: gives the 2-norm of the whole gradient of which the tensors given are this
            rank's parts, as a scalar tensor, the same on every rank; left out: they are the whole.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        precision: PrecisionPolicy,
        parameters: Iterable[torch.Tensor],
        total_norm: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None = None,
    ) -> None:
        self.optimizer, self.precision = optimizer, precision
        self.parameters = list(parameters)
        self._total_norm = total_norm or nn.utils.get_total_norm
        self._skipping = DeviceSkipping(optimizer)
        self._normalized = False
        self._clipped: torch.Tensor | None = None

    def normalize(self, divisor: float) -> None:
        """Divide the gradient of a step, once.

        Args:
            divisor: as for :meth:`step`.
        """
        if not self._normalized:
            self._normalized = True
            self.precision.unscale(self.optimizer)
            scale_gradients(self.parameters, _inverse(divisor))

    def _clip_whole(self, divisor: float, max_norm: float) -> torch.Tensor:
        """:meth:`normalize` and :meth:`clip`, in one pass over the gradient."""
        if self._normalized:
            return self.clip(max_norm)
        self.precision.unscale(self.optimizer)
        return self.clip(max_norm, _inverse(divisor))

    def clip_now(self, max_norm: float) -> torch.Tensor:
        """Clip what :meth:`normalize` has left, before the step, which looks whether it is finite.

        Returns:
            The norm before, a scalar.
        """
        self._clipped = self.clip(max_norm)
        return self._clipped

    def give_up(self) -> None:
        """Be ready for another step, after one whose gradient was divided and not stepped by."""
        if self._normalized and self.precision.scaler is not None:
            # It may have overflowed; and it is unscaled once between two updates.
            self.precision.scaler.update()
        self._normalized, self._clipped = False, None

    def step(self, divisor: float, max_norm: float | None, *, careful: bool) -> Update:
        clipped = self._clipped
        if max_norm is None:
            self.normalize(divisor)
        else:
            clipped = self._clip_whole(divisor, max_norm)
        self._normalized, self._clipped = False, None
        if clipped is None:
            return _STEPPED if self.update() else Update(None, stepped=False)
        norm = HostCopy(clipped)
        # In fp16 the scaler finds out by itself, and has to, to lower its scale.
        if not careful or self.precision.scaler is not None:
            return Update(norm, self.update())
        if self._skipping.possible():
            with self._skipping.unless_finite(clipped):
                return Update(norm, self.update(), finite=None)
        if not math.isfinite(norm.read()):
            return Update(norm, stepped=False, finite=False)
        return Update(norm, self.update())

    def clip(self, max_norm: float, factor: float = 1.0) -> torch.Tensor:
        """Multiply the gradient by ``factor``, and clip it to ``max_norm`` unless it is infinite.

        Returns:
            Its norm between the two, a scalar.
        """
        norm = self._total_norm([p.grad for p in self.parameters if p.grad is not None])
        with torch.no_grad():
            norm = norm if factor == 1 else norm * factor
            if math.isinf(max_norm):
                scale_gradients(self.parameters, factor)
            else:
                # torch 2.13, nn/utils/clip_grad.py.
                coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
                scale_gradients(self.parameters, coefficient * factor)
        return norm

    def update(self) -> bool:
        """Step, and return whether the weights changed."""
        return self.precision.step(self.optimizer)


def scale_gradients(parameters: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply the gradients that there are by a number, or a scalar tensor, in place."""
    if not isinstance(factor, torch.Tensor) and factor == 1:
        return
    with torch.no_grad():
        with torch._C.DisableTorchFunctionSubclass():
            grads = [grad for one in parameters if (grad := one.grad) is not None]
            sparse = [grad for grad in grads if grad.is_sparse]
            # What is here of it: shards on several meshes are no list to torch.
            dense = [g.to_local() if is_dtensor(g) else g for g in grads if not g.is_sparse]
        for grad in sparse:
            grad.mul_(factor)
        # A rank may hold none, where a small model is divided among many.
        for device in {grad.device for grad in dense}:
            by = factor.to(device) if isinstance(factor, torch.Tensor) else factor
            there = [grad for grad in dense if grad.device == device]
            torch._foreach_mul_(_buffers_of(there), by)  # pyright: ignore[reportPrivateImportUsage]


def _inverse(divisor: float) -> float:
    # Of no item there is no mean.
    return 1 / divisor if divisor else math.nan


def _buffers_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The buffers that tensors are views of, where these make the whole of one; else themselves.

    On CPUs, and of DTensors, each tensor is a kernel of its own, and frameworks that shard reduce
    many gradients in one buffer.
    """
    found: list[torch.Tensor] = []
    views: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
    for one in tensors:
        base = one._base
        if base is None:
            found.append(one)
        else:
            views.setdefault(id(base), (base, []))[1].append(one)
    for base, held in views.values():
        sizes = [one.numel() for one in held]
        tiled = (
            sum(sizes) == base.numel()
            and 0 not in sizes
            and len({one.storage_offset() for one in held}) == len(held)
            and {one.dtype for one in held} == {base.dtype}
        )
        found += [base] if tiled else held
    return found
