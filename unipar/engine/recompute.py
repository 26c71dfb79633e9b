"""Recomputed activations: a region keeps little of what it computes, and the backward pass computes
the rest again.

By default the region's inputs alone are kept (Chen et al., arXiv:1604.06174). A selective policy
also keeps what takes long to compute for its size.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from unipar.engine.forwards import replace_forward
from unipar.engine.repeatable import Repeatable
from unipar.engine.transforms import Undo, last_first, modules_of_classes, repeated_blocks
from unipar.errors import ConfigError

log = logging.getLogger("unipar")

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
    recompute = _kept_in_part if policy == "selective" else _recomputed
    undo = [_without_caches(model)]
    undo += [replace_forward(one, recompute(one, one.forward)) for one in targets]
    return last_first(undo)


def _without_caches(model: nn.Module) -> Undo:
    """Turn off the caches that models of transformers fill in their forward pass for generation.

    A layer that is computed again would fill its cache again. ``model.generate`` has a setting of
    its own.
    """
    found: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    # Those of transformers say which model they are of.
    found = [one for one in found if isinstance(getattr(one, "model_type", None), str)]
    configs = {id(one): one for one in found if getattr(one, "use_cache", None) is True}
    if configs:
        log.info(
            "activation_checkpointing: config.use_cache is False in this run, since layers that "
            "are computed again would fill their caches twice"
        )
    for config in configs.values():
        config.use_cache = False

    def undo() -> None:
        for config in configs.values():
            config.use_cache = True

    return undo


def _recomputed(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    region = Repeatable(module)

    # A function of its own: torch.compile would take a partial of torch's for nothing to compile
    # where the module itself is compiled.
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            # The compiler sees what is written, and writes it once.
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        with region.forward_pass(args, kwargs) as again:
            contexts = contextlib.nullcontext(), again
            return checkpoint(
                forward, *args, use_reentrant=False, context_fn=lambda: contexts, **kwargs
            )

    return recomputed


def _kept_in_part(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    region = Repeatable(module)
    forward = _casting_each_time(forward)

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            # Compiled code changes nothing in place.
            return checkpoint(forward, *args, use_reentrant=False, context_fn=_contexts, **kwargs)
        with region.forward_pass(args, kwargs) as again:
            contexts = functools.partial(_watched_contexts, again)
            return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return recomputed


def _keep(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # Not "prefer": torch.compile would weigh what is kept by rules of its own.
    kept = operation.name() in KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


_contexts = functools.partial(create_selective_checkpoint_contexts, _keep)


def _watched_contexts(
    again: AbstractContextManager[None],
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """What surrounds both computations of a region where nothing is compiled."""
    keeping, taking = _contexts()
    return _Both(keeping, _Unchanged()), _Both(again, taking)


class _Both(contextlib.AbstractContextManager[None]):
    """Two contexts, the second one inside."""

    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        self._contexts, self._entered = contexts, contextlib.ExitStack()

    def __enter__(self) -> None:
        for one in self._contexts:
            self._entered.enter_context(one)

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


class _Unchanged(TorchDispatchMode):
    """Refuses to change in place what is kept: the second computation would change it again.

    Torch looks at versions (torch 2.13, utils/checkpoint.py, _VersionWrapper), and the output of a
    linear layer without a bias is another tensor of the same memory, with a version of its own
    (``aten::_unsafe_view``).

    Raises:
        ConfigError: an operation writes to it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[int, torch.UntypedStorage] = {}

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._kept.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            taken = func._schema.arguments
            given = {**dict(zip((one.name for one in taken), args, strict=False)), **kwargs}
            for one in taken:
                if one.alias_info is not None and one.alias_info.is_write:
                    self._refuse(func, given.get(one.name))
        made = func(*args, **kwargs)
        if func.name() in KEPT:
            # Held, so that no other memory has its place while this looks.
            self._kept |= _storages(made)
        return made

    def _refuse(self, operation: Any, value: Any) -> None:
        if self._kept.keys() & _storages(value).keys():
            raise ConfigError(
                "activation_checkpointing='selective' keeps the outputs of matrix products, and "
                f"the model changes one in place ({operation.name()}), so that it would be changed "
                "twice. Let the model compute a new tensor (x = x + y in place of x += y), or set "
                "activation_checkpointing='full'."
            )


def _storages(values: Any) -> dict[int, torch.UntypedStorage]:
    """The storages of tensors, or of what they are made of: a DTensor has another for each view."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in (one for one in tree_leaves(values) if isinstance(one, torch.Tensor)):
        if is_traceable_wrapper_subclass(tensor):
            for name in tensor.__tensor_flatten__()[0]:
                found |= _storages(getattr(tensor, name))
        else:
            storage = tensor.untyped_storage()
            # Not its address, which tensors of tensors have not (torch 2.13, storage.py).
            found[storage._cdata] = storage
    return found


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
