"""What in a model keeps it from computing parts: hooks, generators, compiled code."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as modules

HOOKED = "hooks in it are to see whole batches"


def described(hooks: set[Any]) -> str:
    """Why hooks keep a model from computing parts."""
    return HOOKED if hooks else ""


def hooks_in(module: nn.Module) -> set[Any]:
    # Those of all modules are numbered as those of one.
    found: set[Any] = {
        ("everywhere", number)
        for kind in ("forward", "forward_pre", "backward", "backward_pre")
        for number in vars(modules)[f"_global_{kind}_hooks"]
    }
    for one in module.modules():
        for kind in ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks"):
            found |= {(kind, number) for number in getattr(one, kind)}
        # torch has its own, as of weight_norm. torch 2.13, nn/modules/module.py.
        found |= {("before", number) for number, hook in one._forward_pre_hooks.items()
                  if not type(hook).__module__.startswith("torch.")}  # fmt: skip
    # Parameters whose values are elsewhere refuse what is asked of them as tensors.
    with torch._C.DisableTorchFunctionSubclass():
        for one in module.parameters():
            found |= {("parameter", number) for number in one._backward_hooks or ()}
            after: Any = getattr(one, "_post_accumulate_grad_hooks", None)
            found |= {("gradient", number) for number in after or ()}
    return found


def made_of_weights(module: nn.Module) -> set[str]:
    """Paths of attributes that torch's own hooks make anew of weights, as those of weight_norm."""
    hooks: list[tuple[str, Any]] = [
        (path, hook) for path, one in module.named_modules()
        for hook in one._forward_pre_hooks.values()
        if type(hook).__module__.startswith("torch.nn.utils.")
    ]  # fmt: skip
    return {f"{path}.{hook.name}".lstrip(".") for path, hook in hooks if hasattr(hook, "name")}


def draws_by_itself(module: nn.Module) -> str:
    """Why generators in a module keep it from computing parts, if there are any."""
    kinds = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
    held = any(isinstance(v, kinds) for one in module.modules() for v in vars(one).values())
    return "it draws random numbers by a generator of its own" if held else ""


def is_compiled(module: nn.Module) -> bool:
    # The class would take torch's compiler to import. torch 2.8 to 2.13.
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
