"""Models whose weights are divided among ranks, as a loss function sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from unipar.errors import ConfigError
from unipar_colossalai.boosted import Boosted


class Divided(Boosted):
    """Computes with weights that are there only while it does."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        raise ConfigError(
            "the loss function reads the model's parameters, which are divided among ranks: there "
            "is nothing to read outside of model(...). Use weight_decay of the optimizer for a "
            "penalty, or plugin='zero2', which keeps parameters whole."
        )


class Working(Divided):
    """Computes with Gemini's half-precision weights, and gives what comes out in fp32."""

    def __init__(self, module: nn.Module, gemini: Any) -> None:
        super().__init__(module, gemini)
        object.__setattr__(self, "_gemini", gemini)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        gemini = self._gemini
        manager = gemini.gemini_manager
        if manager.need_warmup and manager.is_warmup() and not torch.is_grad_enabled():
            # Gemini watches the first training step, and asserts that nothing comes before it
            # (Colossal-AI 0.5.0, zero/gemini/gemini_ddp.py, forward).
            given = _cast((args, kwargs), gemini.mixed_precision)
            out = gemini._inference_forward(*given[0], **given[1])
            manager.compute_list.clear()
        else:
            out = gemini(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return _cast(out, torch.float32)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        # Colossal-AI's own tensor class would go on to hook whatever the loss is made of.
        plain = leaf.as_subclass(torch.Tensor)
        return plain.to(dtype) if plain.is_floating_point() else plain

    return tree_map(one, value)


def guard_forward(module: nn.Module) -> Callable[[], None]:
    """Refuse a call of the module itself, whose weights are not there; what takes it back."""
    from colossalai.tensor.param_op_hook import (  # pyright: ignore[reportMissingImports]
        ColoParamOpHookManager,
    )

    def check(module: nn.Module, args: Any) -> None:
        if not ColoParamOpHookManager.has_hook():
            raise ConfigError(
                "engine.module was called, and Gemini has divided its weights among ranks. Call "
                "the engine, engine(...), which gathers them."
            )

    return module.register_forward_pre_hook(check).remove
