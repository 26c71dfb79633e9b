"""Cross-entropy over a vocabulary that the tensor-parallel ranks divide.

The layer that gives logits keeps each rank's columns, as a DTensor that looks like the whole.
Cross-entropy of it needs a maximum and two sums for each token from the other ranks, and nobody
holds logits or probabilities of the whole vocabulary. (Shoeybi et al., arXiv:1909.08053, section
3.) torch's own context of this name (2.13, distributed/tensor/parallel/loss.py) refuses label
smoothing, and computes wrong gradients, without a word, of a ``log_softmax`` that goes elsewhere.
So do others of DTensor's operations (``mse_loss``), and it takes no plain parameter beside it: what
is neither cross-entropy nor a change of all logits alike is computed from gathered ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from unipar.data.batch import MicroBatch
from unipar.engine.divider import PartOf
from unipar.errors import ConfigError
from unipar.loss import IGNORE_INDEX, LossFn
from unipar_torch.layer_cuts import Activations
from unipar_torch.tensor_plan import TensorPlan


class LossParallel:
    """Has losses of training computed from divided logits. A divider that leaves batches whole."""

    def __init__(self) -> None:
        self.active = False

    @contextlib.contextmanager
    def dividing(
        self, model: nn.Module, microbatch: MicroBatch, loss_fn: LossFn
    ) -> Iterator[PartOf]:
        """See :class:`unipar.engine.divider.Divider`."""
        # Evaluation's metrics are made for whole logits.
        if not torch.is_grad_enabled():
            yield _whole
            return
        self.active = True
        try:
            with _OfDividedLogits():
                yield _whole
        finally:
            self.active = False


class Logits(Activations):
    """How activations leave the layer that gives logits."""

    def __init__(self, mesh: DeviceMesh, loss: LossParallel) -> None:
        super().__init__(mesh)
        self._loss = loss

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        if not self._loss.active:
            return super().gather(part)
        logits = DTensor.from_local(part, self.mesh, [Shard(part.ndim - 1)], run_check=False)
        return _marked(logits)


def refuse_without_logits(plan: TensorPlan, blocks: Collection[str]) -> None:
    """Refuse a plan that divides no layer which may give logits.

    Args:
        plan: of the model.
        blocks: names of its repeated blocks.

    Raises:
        ConfigError: it divides none.
    """
    if not logits_of(plan, blocks):
        raise ConfigError(
            "mesh: loss_parallel divides the logits of a last layer, and "
            f"{plan.source} divides none outside of the model's blocks. Add it to plan={{…}} as "
            "'colwise_gather_output' (its number of outputs has to be a multiple of tp), or leave "
            "loss_parallel out."
        )


def logits_of(plan: TensorPlan, blocks: Collection[str]) -> list[str]:
    """Names of the layers outside of blocks whose output is gathered from columns."""
    return [
        name
        for name, style in plan.styles.items()
        if style == "colwise_gather_output"
        and not any(name.startswith(f"{block}.") for block in blocks)
    ]


def _whole(data: Any) -> Any:
    return data


_ALIKE = {
    *("to", "float", "clone", "detach", "contiguous", "view", "reshape", "flatten", "unflatten"),
    *("transpose", "permute", "movedim", "squeeze", "unsqueeze", "__getitem__", "tanh", "mul"),
    *("div", "mul_", "div_", "__mul__", "__rmul__", "__truediv__", "__imul__", "__itruediv__"),
}
"""Names of operations that, of one tensor and numbers, do the same with each rank's part."""
_ABOUT = {
    *("__get__", "size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous"),
    *("is_floating_point", "is_complex", "element_size", "get_device", "__len__", "__hash__"),
    *("__repr__", "__format__", "register_hook", "retain_grad", "requires_grad_"),
}
"""Names of operations that compute nothing."""
_INTO = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"}
"""Names of operations that change their first argument, beside those that end in ``_``."""


class _OfDividedLogits(TorchFunctionMode):
    """Computes cross-entropy of divided logits in parts; what else is made of them is gathered."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _ABOUT or not _any_divided((*args, *kwargs.values())):
            return func(*args, **kwargs)
        if func is functional.cross_entropy:
            found = _cross_entropy(*args, **kwargs)
            if found is not None:
                return found
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if name in _ALIKE and len(tensors) == 1:
            out = func(*args, **kwargs)
            # The loss itself is for the engine, which knows plain tensors.
            return _marked(out) if out.ndim else out.full_tensor()
        into = name in _INTO or (name.endswith("_") and not name.endswith("__"))
        if _is_divided(kwargs.get("out")) or (into and _is_divided(args[0])):
            raise ConfigError(
                f"mesh: {name} changes logits in place, of which loss_parallel leaves each rank a "
                "part. Make new ones of them (torch.where, masked_fill), or leave loss_parallel "
                "out."
            )
        return func(*tree_map(_gathered, args), **tree_map(_gathered, kwargs))


def _marked(logits: torch.Tensor) -> torch.Tensor:
    """Tell them from parameters, which may be DTensors of the same mesh."""
    vars(logits)["divided_logits"] = True
    return logits


def _is_divided(value: Any) -> bool:
    return isinstance(value, DTensor) and "divided_logits" in vars(value)


def _any_divided(values: Iterable[Any]) -> bool:
    return any(_any_divided(v) if type(v) in (list, tuple) else _is_divided(v) for v in values)


def _gathered(value: Any) -> Any:
    return value.full_tensor() if _is_divided(value) else value


def _cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = IGNORE_INDEX,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """The arguments of ``torch.nn.functional.cross_entropy``; ``None`` where that has to do it."""
    classes = min(1, input.ndim - 1)
    if (
        not isinstance(input, DTensor)
        or input.placements != (Shard(classes),)
        or target.is_floating_point()
        or weight is not None
        or size_average is not None
        or reduce is not None
        or reduction not in ("none", "mean", "sum")
    ):
        return None
    part = input.to_local().movedim(classes, -1)
    kept = target != ignore_index
    chosen = torch.where(kept, target, 0)
    losses: Any = _CrossEntropy.apply(part, chosen, input.device_mesh, label_smoothing)
    losses = torch.where(kept, losses, 0.0)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / kept.sum() if reduction == "mean" else total


class _CrossEntropy(torch.autograd.Function):
    """Of each row of logits, of whose columns each rank has some."""

    @staticmethod
    def forward(
        ctx: Any, part: torch.Tensor, target: torch.Tensor, mesh: DeviceMesh, smoothing: float
    ) -> torch.Tensor:
        group, rank, columns = mesh.get_group(), mesh.get_local_rank(), part.shape[-1]
        vocabulary, first = columns * mesh.size(), columns * rank
        # A target that no rank has is the first's or the last's, where looking it up fails.
        here = torch.ones_like(target, dtype=torch.bool)
        if rank > 0:
            here &= target >= first
        if rank < mesh.size() - 1:
            here &= target < first + columns
        own = torch.where(here, target - first, 0).unsqueeze(-1)
        greatest = part.amax(-1).float()
        dist.all_reduce(greatest, dist.ReduceOp.MAX, group)
        shifted = part.float() - greatest.unsqueeze(-1)
        chosen = torch.where(here, shifted.gather(-1, own).squeeze(-1), 0.0)
        every = shifted.sum(-1) if smoothing else torch.zeros_like(chosen)
        probabilities = shifted.exp_()
        sums = torch.stack([probabilities.sum(-1), chosen, every])
        dist.all_reduce(sums, group=group)
        total, chosen, every = sums
        probabilities /= total.unsqueeze(-1)
        ctx.save_for_backward(probabilities, own, here)
        ctx.smoothing, ctx.vocabulary, ctx.dtype = smoothing, vocabulary, part.dtype
        mixed = (1 - smoothing) * chosen + smoothing / vocabulary * every
        return total.log() - mixed

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        (gradient,) = grad_outputs
        probabilities, own, here = ctx.saved_tensors
        wanted = (1 - ctx.smoothing) * here.to(probabilities.dtype)
        found = probabilities - ctx.smoothing / ctx.vocabulary
        found.scatter_add_(-1, own, -wanted.unsqueeze(-1))
        return (found * gradient.unsqueeze(-1)).to(ctx.dtype), None, None, None
