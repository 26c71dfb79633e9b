"""Recomputed activations: a region keeps little of what it computes, and the backward pass computes
the rest again.

By default the region's inputs alone are kept (Chen et al., arXiv:1604.06174). A selective policy
also keeps what takes long to compute for its size.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from unipar.engine.transforms import Undo, modules_of_classes, repeated_blocks
from unipar.errors import ConfigError

KEPT = frozenset(
    {
        # Products with weights, and convolutions: many operations for each byte that they give.
        "aten::mm",
        "aten::addmm",
        "aten::_scaled_mm",
        "aten::_grouped_mm",
        "aten::_scaled_grouped_mm",
        "aten::convolution",
        # Fused attention, which gives a row for each query; the scores are never there.
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "flex_attention",
        # Sums and exchanges over ranks, which wait for others.
        "_c10d_functional::all_reduce",
        "_c10d_functional::reduce_scatter_tensor",
        "_c10d_functional::all_to_all_single",
    }
)
"""Operations whose outputs ``"selective"`` keeps.

It is the choice that torchtitan makes (``torchtitan/distributed/activation_checkpoint.py``: matrix
products, fused attention, reductions over ranks), and that Korthikanti et al. argue for
(arXiv:2205.05198, section 5): norms, activation functions, dropout, and attention that is written
out in batched products (``bmm``) take much memory and little time. So batched products are computed
again, and so are gathers, whose outputs are as many times larger than what a rank has as there are
ranks.
"""


def checkpoint_activations(model: nn.Module, policy: str | tuple[str, ...]) -> Undo:
    """Recompute activations of each repeated block, or of named classes, in the backward pass.

    ``forward`` is replaced on the instances, so that no parameter changes its name.

    Args:
        model: the whole model.
        policy: ``"off"``; ``"full"`` and ``"selective"`` for repeated blocks, of which the second
            keeps the outputs of :data:`KEPT`; or names of classes, of which nothing is kept.

    Raises:
        ConfigError: no module fits the policy.
    """
    if policy == "off":
        return lambda: None
    if isinstance(policy, str):
        if policy not in ("full", "selective"):
            raise ConfigError(
                f"activation_checkpointing={policy!r} is no word for it. Allowed: 'off', 'full', "
                f"'selective', or a tuple of module classes: ({policy!r},)."
            )
        targets = repeated_blocks(model)
        if not targets:
            raise ConfigError(
                f"activation_checkpointing={policy!r} recomputes repeated blocks, and this model "
                "has no nn.ModuleList or nn.Sequential of modules of one class. Name the module "
                "classes: activation_checkpointing=('MyBlock',)."
            )
    else:
        targets = modules_of_classes(model, policy, "activation_checkpointing")
    for module in targets:
        if policy == "selective":
            forward = _casting_each_time(module.forward)
            module.forward = _recomputed(module, forward, context_fn=_contexts)
        else:
            module.forward = _recomputed(module, module.forward)

    def undo() -> None:
        for module in targets:
            module.__dict__.pop("forward", None)

    return undo


def _recomputed(module: nn.Module, forward: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    constant: Constant = {}
    # Where the compiler gives a region up (a graph break), it is to compile what this calls, and
    # not this: it would take is_compiling() for true in what is then an ordinary call. The code is
    # one for all regions. Imported here, for it takes a second, which checkpoint() takes as well.
    from torch._dynamo.eval_frame import skip_code

    skip_code(_updating_once(module, forward, constant).__code__)

    # A function of its own: torch.compile would take a partial of torch's for nothing to compile
    # where the module itself is compiled.
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        region = _updating_once(module, forward, constant)
        return checkpoint(region, *args, use_reentrant=False, **how, **kwargs)

    return recomputed


def _updating_once(
    module: nn.Module, forward: Callable[..., Any], constant: Constant
) -> Callable[..., Any]:
    """A forward pass of a region which, done again, begins with the same buffers and leaves them.

    Without that, BatchNorm would count each batch twice, and what is read before it is updated
    would be another thing the second time.
    """
    before: list[Buffers] = []

    def once(*args: Any, **kwargs: Any) -> Any:
        # The compiler itself sees what is written to buffers, and writes it once.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if before:
            with _buffers_as(before[0]):
                return forward(*args, **kwargs)
        here = _Before(module)
        output = forward(*args, **kwargs)
        before.append(here.keep(constant))
        return output

    return once


Buffers = list[tuple[nn.Module, dict[str, torch.Tensor | None]]]
"""What each module of a region has for buffers."""
Constant = dict[tuple[bool, ...], set[tuple[int, str]]]
"""Buffers that a region only reads: by which of its modules train, the module's number and name."""


class _Before:
    """A region's buffers before its forward pass."""

    def __init__(self, module: nn.Module) -> None:
        self._buffers: Buffers = [(one, dict(one._buffers)) for one in module.modules()]
        self._copies = _Copied()
        for _, buffers in self._buffers:
            for buffer in buffers.values():
                self._copies.of(buffer)

    def keep(self, constant: Constant) -> Buffers:
        """The buffers as they were: copies of those that change, and the rest themselves.

        A version says nothing of what a kernel or ``.data`` has written (BatchNorm's statistics
        are such), so values are compared, once for each way in which the region's modules train:
        a mask or a table of angles would otherwise be kept once for each forward pass.
        """
        trains = tuple(one.training for one, _ in self._buffers)
        found = constant.get(trains)
        if found is None:
            found = constant[trains] = {
                (number, name)
                for number, (_, buffers) in enumerate(self._buffers)
                for name, buffer in buffers.items()
                if buffer is not None and torch.equal(buffer, self._copies.of(buffer))
            }
        return [
            (
                one,
                {
                    name: buffer
                    if (number, name) in found and not self._copies.moved(buffer)
                    else self._copies.of(buffer)
                    for name, buffer in buffers.items()
                },
            )
            for number, (one, buffers) in enumerate(self._buffers)
        ]


class _Copied:
    """Copies of tensors, one of each, so that what two modules share stays shared."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}

    def of(self, buffer: Any) -> Any:
        """The copy of a tensor, made when it is first asked for."""
        if buffer is None:
            return None
        if id(buffer) not in self._made:
            # With the tensor, or another could have its id.
            copy = buffer.detach().clone()
            self._made[id(buffer)] = buffer, buffer._version, copy
        return self._made[id(buffer)][2]

    def moved(self, buffer: Any) -> bool:
        """Whether a tensor is known to be changed since it was copied."""
        return buffer is not None and self._made[id(buffer)][1] != buffer._version


@contextlib.contextmanager
def _buffers_as(before: Buffers) -> Iterator[None]:
    """Compute with copies of these buffers; then the modules have their own again.

    Copies, for the backward pass may come more than once.
    """
    copied = _Copied()
    owned = [(one, dict(one._buffers)) for one, _ in before]
    try:
        for one, buffers in before:
            one._buffers.clear()
            one._buffers.update({name: copied.of(buffer) for name, buffer in buffers.items()})
        yield
    finally:
        for one, buffers in owned:
            one._buffers.clear()
            one._buffers.update(buffers)


def _keep(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # Not "prefer": torch.compile would weigh what is kept by rules of its own.
    kept = operation.name() in KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


_contexts = functools.partial(create_selective_checkpoint_contexts, _keep)


def _casting_each_time(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Let autocast cast each weight where it is used, and not take a cast of another region's.

    A region is computed again by itself, where that cast is gone. Selective checkpointing counts
    operations, and would meet one that it does not know.
    """

    def uncached(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        before = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            return forward(*args, **kwargs)
        finally:
            torch.set_autocast_cache_enabled(before)

    return uncached
