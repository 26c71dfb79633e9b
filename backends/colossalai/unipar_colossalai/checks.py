"""What plugins that divide state among ranks cannot take, found before it goes wrong."""

from __future__ import annotations

import torch
from torch import nn, optim

from unipar.errors import ConfigError


def check_parameters(module: nn.Module) -> None:
    """Refuse parameters that such a plugin would fail on, or train wrongly."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype is not torch.float32:
            raise ConfigError(
                f"colossalai: parameter '{name}' is {parameter.dtype}, and this plugin updates "
                "what it trains in float32. Call model.float(); precision='bf16' computes in "
                "bfloat16 all the same."
            )


def check_no_scalar(module: nn.Module) -> None:
    """Refuse a parameter that FSDP has no dimension to divide by."""
    for name, parameter in module.named_parameters():
        if not parameter.ndim:
            raise ConfigError(
                f"colossalai: parameter '{name}' is a scalar, which the FSDP plugin cannot divide. "
                "Give it the shape (1,), or use plugin='zero2'."
            )


def check_optimizer(module: nn.Module, optimizer: optim.Optimizer) -> None:
    """Refuse an optimizer whose parameters are not all that are trained."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and id(parameter) not in held:
            raise ConfigError(
                f"colossalai: parameter '{name}' requires a gradient, and the optimizer does not "
                "hold it, so that ranks would not agree on it. Give it to the optimizer, or freeze "
                "it with requires_grad_(False)."
            )
    if not optimizer.param_groups[0]["params"]:
        raise ConfigError(
            "colossalai: the optimizer's first parameter group is empty, and Colossal-AI takes the "
            "dtype from there. Leave empty groups out."
        )
