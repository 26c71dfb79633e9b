"""``deepspeed.zero``: models that are built divided, and parameters that are looked at whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unipar.compat.deepspeed_names import ZERO_MODULE
from unipar.compat.run import current
from unipar.errors import ConfigError
from unipar.state import is_dtensor


class Init(contextlib.nullcontext[None]):
    """A block in which models are built, each rank the whole of it: the strategy divides it later.

    Arguments are DeepSpeed's, and mean nothing.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
    ) -> None:
        super().__init__()


class GatheredParameters:
    """A block in which parameters are whole, which they are unless the strategy divides them.

    Args:
        params: a parameter or several.
        modifier_rank: whose changes all ranks take over at the end of the block; collective.
        fwd_module: means nothing.
        enabled: whether anything is done.

    Raises:
        ConfigError: the strategy divides them; or they are changed, and it has copies of them.
    """

    def __init__(
        self,
        params: torch.Tensor | Iterable[torch.Tensor],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given = [params] if isinstance(params, torch.Tensor) else list(params)
        self.params, self.modifier_rank = given if enabled else [], modifier_rank

    def __enter__(self) -> None:
        session = current.session
        if session is None:
            return
        trained = {id(p) for one in session.engines.values() for p in one.module.parameters()}
        for parameter in self.params:
            if is_dtensor(parameter) or _is_part(parameter):
                raise ConfigError(
                    "zero.GatheredParameters: the strategy divides these parameters among ranks. "
                    "Look at them before deepspeed.initialize; or use "
                    "engine.module_state_dict() of all ranks, which rank 0 gets whole."
                )
            changed = id(parameter) in trained and self.modifier_rank is not None
            if changed and session.capabilities.sharded:
                raise ConfigError(
                    "zero.GatheredParameters(modifier_rank=…): the strategy has copies of these "
                    "parameters, which a change would not reach. Set them before "
                    "deepspeed.initialize, or use engine.load_checkpoint."
                )

    def __exit__(self, *error: object) -> None:
        if self.modifier_rank is None or current.placement().size == 1 or error[0] is not None:
            return
        world = current.world()
        for parameter in self.params:
            sent = parameter.detach().to(world.device)
            dist.broadcast(sent, src=self.modifier_rank)
            with torch.no_grad():
                parameter.copy_(sent)


def _is_part(parameter: Any) -> bool:
    """Whether ZeRO's stage 3 has taken a parameter's values away."""
    return getattr(parameter, "ds_numel", parameter.numel()) != parameter.numel()


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing: strategies find out themselves which parameters a module uses."""


__getattr__ = ZERO_MODULE.refusing(__name__)
