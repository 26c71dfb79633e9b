"""``deepspeed.zero``: models that are built divided, and parameters that are looked at whole."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from unipar.compat.deepspeed_names import ZERO_MODULE
from unipar.compat.gathering import gather
from unipar.compat.run import current
from unipar.errors import ConfigError


class Init(contextlib.AbstractContextManager[None]):
    """A block in which models are built, each rank the whole of it: the strategy divides it later.

    They are built on the host, and are not to fit on a GPU. Random numbers are the GPU's where
    the run computes on one, as DeepSpeed's are, which builds there. Arguments are DeepSpeed's, and
    but for ``enabled`` mean nothing.
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
        self._enabled = enabled
        self._drawing = contextlib.ExitStack()

    def __enter__(self) -> None:
        if self._enabled:
            self._drawing.enter_context(_drawing())

    def __exit__(self, *error: Any) -> None:
        self._drawing.close()


def _drawing() -> contextlib.AbstractContextManager[Any]:
    """Random numbers are those of the device that the run computes on."""
    if current.placement().device_type == "cuda":
        return _Drawing(current.device())
    return contextlib.nullcontext()


class _Drawing(TorchFunctionMode):
    """Fills tensors on the host with random numbers of a device's generator.

    Args:
        device: whose.
    """

    FILLS: ClassVar = frozenset(
        {
            torch.Tensor.bernoulli_,
            torch.Tensor.cauchy_,
            torch.Tensor.exponential_,
            torch.Tensor.geometric_,
            torch.Tensor.log_normal_,
            torch.Tensor.normal_,
            torch.Tensor.random_,
            torch.Tensor.uniform_,
            # These ask for modes as a whole, and what they call is not seen.
            nn.init.kaiming_uniform_,
            nn.init.normal_,
            nn.init.uniform_,
        }
    )
    CREATES: ClassVar = frozenset({torch.rand, torch.randn, torch.randint, torch.randperm})

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        if func in self.CREATES and kwargs.get("device") is None:
            return func(*args, **kwargs, device=self.device).cpu()
        if func not in self.FILLS:
            return func(*args, **kwargs)
        filled, *more = args or (kwargs.pop("tensor"),)
        if not filled.is_cpu:
            return func(filled, *more, **kwargs)
        with torch.no_grad():
            return filled.copy_(func(torch.empty_like(filled, device=self.device), *more, **kwargs))


class GatheredParameters:
    """A block in which parameters are whole, as copies where the strategy divides them. Collective.

    Args:
        params: a parameter or several.
        modifier_rank: whose changes all ranks take over at the end of the block; without it they
            are lost where the strategy divides parameters, as in DeepSpeed.
        fwd_module: means nothing.
        enabled: means nothing for what is divided: a script that asks for a lower stage of ZeRO
            than divides parameters finds them whole without it.

    Raises:
        ConfigError: they are changed, and the strategy has copies or parts of them.
    """

    def __init__(
        self,
        params: torch.Tensor | Iterable[torch.Tensor],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self.params = [params] if isinstance(params, torch.Tensor) else list(params)
        self.modifier_rank = modifier_rank if enabled else None
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> None:
        session = current.session
        if session is None:
            # What Init has built is on the host.
            self._undo.enter_context(_drawing())
        if session is None or not session.capabilities.sharded:
            return
        divided = "parameters" in session.capabilities.sharded
        asked = {id(one) for one in self.params}
        for engine in session.engines.values():
            named = {n: p for n, p in engine.module.named_parameters() if id(p) in asked}
            if named and self.modifier_rank is not None:
                raise ConfigError(
                    "zero.GatheredParameters(modifier_rank=…): the strategy has copies or parts of "
                    "these parameters, which a change would not reach. Set them before "
                    "deepspeed.initialize, or use engine.load_checkpoint."
                )
            if named and divided:
                states = [one for one in engine.export_state().weights if one.name in named]
                for name, whole in gather(states, session.world, kept=True).items():
                    self._undo.callback(_show(named[name], whole))

    def __exit__(self, *error: object) -> None:
        self._undo.close()
        if self.modifier_rank is None or current.placement().size == 1 or error[0] is not None:
            return
        world = current.world()
        for parameter in self.params:
            sent = parameter.detach().to(world.device)
            dist.broadcast(sent, src=self.modifier_rank)
            with torch.no_grad():
                parameter.copy_(sent)


def _show(parameter: Any, whole: torch.Tensor) -> Callable[[], None]:
    """Have a part of a parameter look like the whole; returns what takes that back."""
    # The data of a DTensor cannot be any other tensor's; a class is chosen by who looks.
    kind, parameter._whole = type(parameter), whole.to(parameter.device, parameter.dtype)
    parameter.__class__ = _whole_of(kind)

    def undo() -> None:
        parameter.__class__ = kind
        del parameter._whole

    return undo


@functools.cache
def _whole_of(kind: Any) -> Any:
    def as_whole(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_map_only(cls, lambda one: one.__dict__["_whole"], (args, kwargs or {}))
        return func(*given[0], **given[1])

    return type("Whole", (kind,), {"__torch_function__": classmethod(as_whole)})


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing: strategies find out themselves which parameters a module uses."""


__getattr__ = ZERO_MODULE.refusing(__name__)
