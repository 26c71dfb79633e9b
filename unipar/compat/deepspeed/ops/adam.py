"""DeepSpeed's Adam, whose arithmetic torch's has too."""

from __future__ import annotations

from typing import Any

import torch

from unipar.compat.deepspeed_names import ADAM
from unipar.errors import ConfigError


class FusedAdam(torch.optim.Adam):
    """Adam with decoupled weight decay, of which there is none unless it is given.

    Raises:
        ConfigError: it is asked for without bias correction, or with AMSGrad.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if not bias_correction or amsgrad:
            raise ConfigError(
                f"FusedAdam(bias_correction={bias_correction}, amsgrad={amsgrad}): torch's Adam "
                "corrects for bias always, and FusedAdam knows no AMSGrad. Leave both out."
            )
        super().__init__(
            params, lr=lr, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay,
            decoupled_weight_decay=adam_w_mode,
        )  # fmt: skip


class DeepSpeedCPUAdam(FusedAdam):
    """:class:`FusedAdam`; where its state lies is an option of the strategy."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad
        )


__getattr__ = ADAM.refusing(__name__)
