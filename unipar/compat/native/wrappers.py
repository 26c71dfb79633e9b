"""Wrappers of models: they tell of how the script trains, and leave training to the strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unipar.compat.adopting import adoption
from unipar.compat.dividing.batch_norms import is_batch_norm
from unipar.compat.run import current
from unipar.data import move_to
from unipar.engine import broadcast_tensors, share_buffers
from unipar.engine.replicas import unlike
from unipar.errors import ConfigError, first_few
from unipar.state import is_dtensor

_OPTIONS = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "bucket_cap_mb")
_PLACED = ("broadcast_buffers", "check_reduction", "init_sync")
_IGNORED = "_ddp_params_and_buffers_to_ignore"
_SYNCS = "forward_sync_buffers"
"""What ``broadcast_buffers`` is called since torch 2.13."""
_OWN = ("register_comm_hook", "reducer", "logger", "_set_static_graph",
        "will_sync_module_buffers", "process_group")  # fmt: skip


class _Wrapper(nn.Module):
    """A module of which the parameters are called ``module.…``."""

    _unipar_passes = True
    _moves_inputs = False

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._moves_inputs and (device := next(self.module.parameters()).device).type != "cpu":
            args, kwargs = move_to((args, kwargs), device)
        return self.module(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.module.zero_grad(set_to_none)

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if not all(name.startswith("module.") for name in state_dict):
            return super().load_state_dict(state_dict, *args, **kwargs)
        own = {name.removeprefix("module."): one for name, one in state_dict.items()}
        return self.module.load_state_dict(own, *args, **kwargs)


class DistributedDataParallel(_Wrapper):
    """torch's: its options are those of the strategy ``ddp`` for this model, if the run has it.

    Attributes:
        forward_sync_buffers: whether forward passes begin with rank 0's buffers.
        require_backward_grad_sync: whether this pass is not within ``no_sync``.
        require_forward_param_sync: whether the last one with gradients was not, and came last.

    Raises:
        ConfigError: an option has no counterpart.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        **options: Any,
    ) -> None:
        # Forward passes alone are what torch 2.13's new name is of.
        syncs, broadcasts = options.pop(_SYNCS, None), options.get("broadcast_buffers")
        broadcasts = True if broadcasts is None else bool(broadcasts)
        begin_alike = syncs is not None or broadcasts
        syncs = broadcasts if syncs is None else bool(syncs)
        if options.get("init_sync") is False:
            raise ConfigError(
                "DistributedDataParallel(init_sync=False): strategies give all ranks the weights "
                "of rank 0 as they begin. Leave it out."
            )
        for name, value in options.items():
            if name not in (*_OPTIONS, *_PLACED) and value not in (None, False):
                raise ConfigError(
                    f"DistributedDataParallel({name}=…) has no counterpart here. Leave it out; the "
                    f"options that there are are {', '.join((*_OPTIONS, 'broadcast_buffers'))}."
                )
        if getattr(module, _IGNORED, None) and current.placement().size > 1:
            _check_ignored(module, broadcasts=syncs)
        super().__init__(module)
        if current.placement().size > 1:
            with adoption.engine_calls():
                tensors = list[torch.Tensor](module.parameters())
                if begin_alike:
                    tensors += module.buffers()
                # A model that is wrapped again may have been divided by its strategy.
                broadcast_tensors([t for t in tensors if not is_dtensor(t)], current.world())
        adoption.note_wrapped(module)
        adoption.sums_in_backward = adoption.by_ddp = True
        adoption.ask(strategy=_ddp())
        # None is torch's own default of some.
        asked = {k: value for k, value in options.items() if k in _OPTIONS and value is not None}
        adoption.options[module] = asked
        self.forward_sync_buffers = syncs
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        # As DDP does, of which a script may make use.
        self.device_ids, self._moves_inputs = device_ids, bool(device_ids)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # As torch 2.13 does it (nn/parallel/distributed.py, _pre_forward and _post_forward), for
        # any module: one that is frozen, or that no engine trains, has buffers, too.
        if (
            self.require_forward_param_sync
            and self.forward_sync_buffers
            and current.may_share_buffers()
            and current.placement().size > 1
            and dist.is_initialized()
        ):
            with adoption.engine_calls():
                share_buffers(self.module.buffers(), current.world())
        syncs = torch.is_grad_enabled() and self.require_backward_grad_sync
        with adoption.syncing() if syncs else contextlib.nullcontext():
            output = super().forward(*args, **kwargs)
        self.require_forward_param_sync = syncs
        return output

    @property
    def broadcast_buffers(self) -> bool:
        """What ``forward_sync_buffers`` was called before torch 2.13."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: Any, names: Any) -> None:
        setattr(module, _IGNORED, names)

    @property
    def device(self) -> torch.device:
        """Where the module is."""
        return next(self.module.parameters()).device

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A block of backward passes that no step is to follow."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            with current.accumulating():
                yield
        finally:
            self.require_backward_grad_sync = before

    def join(self, *args: Any, **kwargs: Any) -> Join:
        """Refused on several ranks, as :class:`Join` is."""
        return Join([self], *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:
            raise ConfigError(
                f"DistributedDataParallel.{name} is DDP's own, and a strategy may be another. "
                "Leave it out; the strategy ddp has the option `compression`."
            )
        return super().__getattr__(name)


class DataParallel(_Wrapper):
    """torch's for several GPUs in one process, which are a process each here."""

    _moves_inputs = True

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module)


class SyncBatchNorm(nn.SyncBatchNorm):
    """torch's; models are converted by the strategy."""

    @classmethod
    def convert_sync_batchnorm(cls, module: Any, process_group: Any = None) -> Any:
        """Ask the strategy ``ddp`` for it.

        Raises:
            ConfigError: it is for a group of ranks, or the run has another strategy.
        """
        if process_group is not None:
            raise ConfigError("convert_sync_batchnorm(process_group=…): it is over all ranks here.")
        adoption.ask(strategy={**_ddp(), "sync_batchnorm": True})
        adoption.synchronized.update(one for one in module.modules() if is_batch_norm(one))
        return module


class ZeroRedundancyOptimizer:
    """Refused."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(
            "ZeroRedundancyOptimizer: the strategy divides the optimizer's state. Build the "
            "optimizer itself, and set strategy: {name: ddp, shard_optimizer: true} in unipar.yaml."
        )


class Join:
    """Refused on several ranks."""

    def __init__(self, joinables: Any, *args: Any, **kwargs: Any) -> None:
        if current.placement().size > 1:
            raise ConfigError(
                "Join lets ranks run different numbers of steps, and an engine's steps are of all "
                "ranks. Use a DistributedSampler, which pads."
            )

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _check_ignored(module: Any, *, broadcasts: bool) -> None:
    """Refuse that DDP leaves something to each rank that strategies make the same. Collective."""
    ignored = set(getattr(module, _IGNORED))
    named = [(n, p) for n, p in module.named_parameters() if n in ignored]
    with adoption.engine_calls():
        left = unlike([(n, p) for n, p in named if not p.requires_grad], current.world())
    left += [name for name, p in named if p.requires_grad]
    if broadcasts:
        left += [name for name, _ in module.named_buffers() if name in ignored]
    if left:
        raise ConfigError(
            f"DistributedDataParallel leaves to each rank what {type(module).__name__}.{_IGNORED} "
            f"names ({first_few(left)}), and strategies sum the gradients of all that is trained, "
            "and give ranks the same weights and buffers. Freeze these parameters "
            "(requires_grad_(False)) with the same values on all ranks, and give "
            "broadcast_buffers=False for buffers; or keep them in a module that is not wrapped."
        )


def _ddp() -> dict[str, Any]:
    known = adoption.asked.get("strategy")
    return known if isinstance(known, dict) and known["name"] == "ddp" else {"name": "ddp"}
