"""Recomputed activations: a region keeps little of what it computes, and the backward pass computes
the rest again.

By default the region's inputs alone are kept (Chen et al., arXiv:1604.06174). A selective policy
also keeps what takes long to compute for its size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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
            module.forward = _recomputed(_casting_each_time(module.forward), context_fn=_contexts)
        else:
            module.forward = _recomputed(module.forward)

    def undo() -> None:
        for module in targets:
            module.__dict__.pop("forward", None)

    return undo


def _recomputed(forward: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    # A function of its own: torch.compile would take a partial of torch's for nothing to compile
    # where the module itself is compiled.
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **how, **kwargs)

    return recomputed


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
