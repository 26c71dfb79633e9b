"""Optimizers under Colossal-AI's names: PyTorch's own, which every strategy knows."""

from __future__ import annotations

from typing import Any

import torch

from unipar.compat.colossalai_names import OPTIMIZERS
from unipar.errors import ConfigError

__all__ = ["CPUAdam", "FusedAdam", "FusedSGD", "HybridAdam"]


class FusedAdam:
    """``torch.optim.AdamW``, or ``torch.optim.Adam`` with ``adamw_mode=False``: the same update.

    Raises:
        ConfigError: it is to update otherwise.
    """

    def __new__(
        cls,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adamw_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> Any:
        if amsgrad:
            raise ConfigError(f"{cls.__name__} does not support the AMSGrad variant.")
        return _adam(
            cls.__name__, params, lr, bias_correction, betas, eps, weight_decay, adamw_mode
        )


class CPUAdam:
    """:class:`FusedAdam`, whose arguments have another order.

    Raises:
        ConfigError: it is to update otherwise, or to keep its state in files.
    """

    def __new__(
        cls,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | None = None,
        **defaults: Any,
    ) -> Any:
        if nvme_offload_fraction:
            raise ConfigError(
                f"{cls.__name__}(nvme_offload_fraction={nvme_offload_fraction}) has no counterpart "
                "here. Leave it out, and use the strategy zero3 with offload_optimizer and "
                "nvme_path in unipar.yaml."
            )
        return _adam(
            cls.__name__, model_params, lr, bias_correction, betas, eps, weight_decay, adamw_mode
        )


class HybridAdam(CPUAdam):
    """:class:`CPUAdam`."""


def _adam(
    name: str,
    params: Any,
    lr: float,
    bias_correction: bool,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    adamw_mode: bool,
) -> torch.optim.Optimizer:
    if not bias_correction:
        raise ConfigError(
            f"{name}(bias_correction=False) has no counterpart here: PyTorch's Adam corrects its "
            "moments. Leave it out."
        )
    kind = torch.optim.AdamW if adamw_mode else torch.optim.Adam
    return kind(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


class FusedSGD:
    """``torch.optim.SGD``: the same update.

    Raises:
        ConfigError: it is to update otherwise.
    """

    def __new__(
        cls,
        params: Any,
        lr: float,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
    ) -> Any:
        if wd_after_momentum:
            raise ConfigError("FusedSGD(wd_after_momentum=True) has no counterpart here.")
        return torch.optim.SGD(
            params, lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay,
            nesterov=nesterov,
        )  # fmt: skip


__getattr__ = OPTIMIZERS.refusing(__name__)
