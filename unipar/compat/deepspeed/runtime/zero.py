"""``deepspeed.zero``: models that are built divided, and parameters that are looked at whole."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from unipar.compat.deepspeed_names import ZERO_MODULE
from unipar.compat.gathering import gather
from unipar.compat.run import current
from unipar.errors import ConfigError


class Init(contextlib.AbstractContextManager[None]):
    """A block in which models are built, each rank the whole of it: the strategy divides it later.

    They are built on the host, and need not fit on a GPU. Where the run computes on one, weights
    are drawn by its generator, as by DeepSpeed, which builds there. Arguments are DeepSpeed's, and
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
        if self._enabled and _on_gpu():
            self._drawing.enter_context(_Drawing(current.device()))
            seen = register_module_parameter_registration_hook(_note_built)
            self._drawing.callback(seen.remove)

    def __exit__(self, *error: Any) -> None:
        self._drawing.close()


_built = WeakTensorKeyDictionary()
"""Parameters of models that were built in a block of :class:`Init` for a GPU."""


def _note_built(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    if parameter is not None:
        _built[parameter] = True


def _on_gpu() -> bool:
    return current.placement().device_type == "cuda"


class _Drawing(TorchFunctionMode):
    """Draws random numbers for tensors on the host where DeepSpeed would have them on a device.

    That is of what it has patched torch to create there, ``randn`` among it, and not ``rand``
    (DeepSpeed 0.19, zero/partition_parameters.py, ``_add_tensor_creation_wrappers``).

    Args:
        device: whose generator draws.
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
    LIKE: ClassVar = frozenset({torch.rand_like, torch.randint_like, torch.randn_like})

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        drawn = func in self.FILLS or func in self.LIKE or func is torch.randn
        told = any(kwargs.get(name) is not None for name in ("generator", "device", "out"))
        if told or not drawn:
            return func(*args, **kwargs)
        if func is torch.randn:
            if not torch.empty(0).is_cpu:
                # The script has another default.
                return func(*args, **kwargs)
            learns = kwargs.pop("requires_grad", False)
            return func(*args, **kwargs, device=self.device).cpu().requires_grad_(learns)
        if func in self.LIKE:
            like, *more = args
            return func(like.to(self.device), *more, **kwargs).to(like.device)
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
        self._enabled = enabled
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> None:
        session = current.session
        if session is None and self._enabled and any(one in _built for one in self.params):
            # They are on the host.
            self._undo.enter_context(_Drawing(current.device()))
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
