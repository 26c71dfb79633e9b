"""The plain PyTorch loops, written by hand, that every strategy has to equal.

Nothing of unipar is imported here: one process, whole global batches given as they are, one forward
and one backward pass for each, the loss as a sum over a count, and its own clipping. What these
loops do is what "the same run" means.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils._pytree import tree_map

Terms = Callable[[Any, Any], tuple[torch.Tensor, Any]]
"""``terms(model, batch)``: the loss summed over the batch's items, and how many items those are."""
MakeOptimizer = Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]
MakeScheduler = Callable[[Optimizer], LRScheduler]
MakeSeveral = Callable[
    [Iterable[tuple[str, nn.Parameter]]], Sequence[tuple[Optimizer, LRScheduler | None]]
]


@dataclass
class Trace:
    """The outside view of a run.

    Attributes:
        losses: mean loss over the items of each global batch, before its update.
        grad_norms: 2-norm of each step's whole gradient, before clipping.
        num_items: items of each global batch.
        lrs: the learning rate of each parameter group, as each step used it.
        skipped: whether each step left the weights alone.
        weights: parameters and buffers at the end, by the names of ``state_dict``.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float | None] = field(default_factory=list)
    num_items: list[float] = field(default_factory=list)
    lrs: list[tuple[float, ...]] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def train(
    model: nn.Module,
    batches: Sequence[Sequence[Any]],
    terms: Terms,
    make_optimizer: MakeOptimizer,
    *,
    make_scheduler: MakeScheduler | None = None,
    make_several: MakeSeveral | None = None,
    max_grad_norm: float | None = None,
    autocast: torch.dtype | None = None,
    half_weights: torch.dtype | None = None,
    leave_out: Collection[int] = (),
    device: str = "cpu",
    loss_scale: float = 1.0,
) -> Trace:
    """Train on each global batch once, in order.

    Args:
        model: trained in place, in the mode it is in.
        batches: the global batches, each as the collated parts that are computed one by one.
        terms: the loss of a part as a sum and a count.
        make_optimizer: called with the model's named parameters.
        make_scheduler: called with the optimizer; stepped after each step that was taken. One that
            waits for a metric is given the number of steps, which never gets better.
        make_several: builds, in place of both, several optimizers and the scheduler of each.
        max_grad_norm: the 2-norm that the gradient is scaled down to.
        autocast: the dtype of the forward pass, where it is not fp32 and the weights are.
        half_weights: the dtype of a copy of the model that computes in place of it; the optimizer
            updates the fp32 model by the copy's gradients, and the copy is rounded from it again.
        leave_out: batches (from 0) that must change nothing.
        device: the type of the device that computes. Kernels round differently on each.
        loss_scale: what the loss is multiplied by for the backward pass, and gradients are divided
            by after it: a power of two, so that it decides only what underflows.
    """
    model.to(device)
    if make_several is None:
        optimizer = make_optimizer(model.named_parameters())
        pairs = [(optimizer, make_scheduler(optimizer) if make_scheduler else None)]
    else:
        pairs = make_several(model.named_parameters())
    copied = copy.deepcopy(model).to(half_weights) if half_weights else None
    compute = model if copied is None else Rounding(copied)
    trace = Trace()
    for index, parts in enumerate(batches):
        groups = [group for optimizer, _ in pairs for group in optimizer.param_groups]
        trace.lrs.append(tuple(float(group["lr"]) for group in groups))
        for optimizer, _ in pairs:
            optimizer.zero_grad()
        with torch.autocast(device, autocast) if autocast else contextlib.nullcontext():
            sums = [terms(compute, _moved(part, device)) for part in parts]
        count = sum(part_count for _, part_count in sums)
        loss = torch.stack([total for total, _ in sums]).sum() / count
        trace.losses.append(loss.item())
        trace.num_items.append(float(count))
        trace.skipped.append(index in leave_out)
        if index in leave_out:
            trace.grad_norms.append(None)
            continue
        (loss * loss_scale).backward()
        if copied is not None:
            _take_gradients(model, copied)
        for parameter in model.parameters():
            if parameter.grad is not None and loss_scale != 1:
                parameter.grad /= loss_scale
        trace.grad_norms.append(_clip(model, max_grad_norm))
        for optimizer, _ in pairs:
            optimizer.step()
        if copied is not None:
            _round_weights(model, copied)
        for _, scheduler in pairs:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(float(index + 1))
            elif scheduler is not None:
                scheduler.step()
    if copied is not None:
        for buffer, rounded in zip(model.buffers(), copied.buffers(), strict=True):
            buffer.copy_(rounded)
    trace.weights = copy_weights(model)
    return trace


class Rounding:
    """Calls a half-precision model with fp32 inputs, and gives its outputs in fp32.

    In all else it is the model, by whose names a loss may compute, too.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._dtype = next(model.parameters()).dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._model(*_cast(args, self._dtype), **_cast(kwargs, self._dtype))
        return _cast(output, torch.float32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _moved(values: Any, device: str) -> Any:
    def one(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

    return tree_map(one, values)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    def one(leaf: Any) -> Any:
        floats = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if floats else leaf

    return tree_map(one, values)


def _take_gradients(model: nn.Module, copied: nn.Module) -> None:
    for own, rounded in zip(model.parameters(), copied.parameters(), strict=True):
        own.grad = None if rounded.grad is None else rounded.grad.float()
        rounded.grad = None


def _round_weights(model: nn.Module, copied: nn.Module) -> None:
    with torch.no_grad():
        for own, rounded in zip(model.parameters(), copied.parameters(), strict=True):
            rounded.copy_(own)


def evaluate(
    model: nn.Module,
    batches: Sequence[Any],
    terms: Terms,
    *,
    half_weights: torch.dtype | None = None,
) -> tuple[float, float]:
    """The loss summed over all items of all batches, and their number."""
    model.eval()
    compute = Rounding(copy.deepcopy(model).to(half_weights)) if half_weights else model
    with torch.no_grad():
        pairs = [terms(compute, batch) for batch in batches]
    return sum(total.item() for total, _ in pairs), sum(float(count) for _, count in pairs)


def train_gan(
    generator: nn.Module,
    discriminator: nn.Module,
    batches: Sequence[Mapping[str, torch.Tensor]],
    make_optimizer: MakeOptimizer,
) -> tuple[Trace, Trace]:
    """Train two models in turn, one step of each on every batch (``real`` and ``noise``).

    The discriminator's loss has as many items as the batch has samples, each seen real and fake.
    """
    optimizer_g = make_optimizer(generator.named_parameters())
    optimizer_d = make_optimizer(discriminator.named_parameters())
    bce = nn.functional.binary_cross_entropy_with_logits
    trace_g, trace_d = Trace(), Trace()
    for batch in batches:
        real, noise = batch["real"], batch["noise"]
        optimizer_d.zero_grad()
        on_real = discriminator(real)
        on_fake = discriminator(generator(noise).detach())
        loss = bce(on_real, torch.ones_like(on_real)) + bce(on_fake, torch.zeros_like(on_fake))
        loss.backward()
        optimizer_d.step()
        _record(trace_d, loss, len(real))

        optimizer_g.zero_grad()
        judged = discriminator(generator(noise))
        loss = bce(judged, torch.ones_like(judged))
        loss.backward()
        optimizer_g.step()
        _record(trace_g, loss, len(real))
    trace_g.weights, trace_d.weights = copy_weights(generator), copy_weights(discriminator)
    return trace_g, trace_d


def train_in_turn(
    models: Sequence[nn.Module],
    batches: Sequence[Any],
    terms: Terms,
    make_optimizer: MakeOptimizer,
) -> list[Trace]:
    """Train models that may share parameters, one step of each on every batch."""
    optimizers = [make_optimizer(model.named_parameters()) for model in models]
    traces = [Trace() for _ in models]
    for batch in batches:
        for model, optimizer, trace in zip(models, optimizers, traces, strict=True):
            optimizer.zero_grad()
            total, count = terms(model, batch)
            loss = total / count
            loss.backward()
            optimizer.step()
            _record(trace, loss, int(count))
    for model, trace in zip(models, traces, strict=True):
        trace.weights = copy_weights(model)
    return traces


def _record(trace: Trace, loss: torch.Tensor, num_items: int) -> None:
    trace.losses.append(loss.item())
    trace.num_items.append(float(num_items))
    trace.grad_norms.append(None)
    trace.skipped.append(False)


def copy_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: tensor.detach().to("cpu", copy=True) for n, tensor in model.state_dict().items()}


def _clip(model: nn.Module, max_grad_norm: float | None) -> float:
    """Scale the gradient to ``max_grad_norm`` where it is longer; its 2-norm before.

    The 1e-6 in the denominator is the convention of ``torch.nn.utils.clip_grad_norm_``.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = math.sqrt(sum(g.double().square().sum().item() for g in gradients))
    if max_grad_norm is not None and norm > max_grad_norm:
        for gradient in gradients:
            gradient.mul_(max_grad_norm / (norm + 1e-6))
    return norm
