"""FSDP's two faces: they ask for the strategy ``fsdp``, and leave the model as it is."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed.fsdp as real
from torch import nn

from unipar.compat.adopting import adoption
from unipar.compat.native.calls import clip_grad_norm_, load_whole_state_dict, named_state_dict
from unipar.compat.run import current
from unipar.compat.taking_up import PRECISIONS
from unipar.errors import ConfigError, first_few

log = logging.getLogger("unipar")
_SHARDING = {"FULL_SHARD": "full", "SHARD_GRAD_OP": "grad_op", "HYBRID_SHARD": "hybrid"}
_REFUSED = ("process_group", "ignored_modules", "ignored_states", "ignored_params", "param_init_fn",
            "shard_placement_fn")  # fmt: skip


class FSDPModule:
    """What ``fully_shard`` puts before a module's class; all of it is the strategy's business."""

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, **options: Any) -> None:
        """Say whether a step is likely to follow the next backward passes."""
        adoption.accumulates = not requires_gradient_sync

    def _apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        # The parameters of FSDP are what they were after to_empty(), so modules share them still.
        shared: dict[int, list[tuple[Any, str]]] = {}
        for module in self.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    shared.setdefault(id(parameter), []).append((module, name))
        super()._apply(fn, recurse)  # pyright: ignore[reportAttributeAccessIssue]
        for (first, name), *others in shared.values():
            for module, other in others:
                module._parameters[other] = first._parameters[name]
        return self

    def _nothing(self, *args: Any, **kwargs: Any) -> None: ...

    # By __getattr__, it would be asked for each submodule in each pass.
    set_requires_all_reduce = set_is_last_backward = set_reshard_after_backward = _nothing
    set_reshard_after_forward = set_unshard_in_backward = unshard = reshard = _nothing
    set_modules_to_forward_prefetch = set_modules_to_backward_prefetch = _nothing


def fully_shard(
    module: Any,
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    **options: Any,
) -> Any:
    """Have the strategy ``fsdp`` divide the model that a module is, or is a part of."""
    found: dict[str, Any] = {}
    if reshard_after_forward is False:
        found["sharding"] = "grad_op"
    if isinstance(offload_policy, real.CPUOffloadPolicy):
        found["cpu_offload"] = True
    for one in module if isinstance(module, (list, tuple)) else [module]:
        half = getattr(mp_policy, "param_dtype", None)
        _check_casts("cast_forward_inputs", half, getattr(mp_policy, "cast_forward_inputs", True))
        _taken(
            one, FSDPModule, found, half, getattr(mesh, "device_type", None), options, mesh,
            getattr(mp_policy, "output_dtype", None),
        )  # fmt: skip
        for name in _FACTORS:
            # torch's own would stand before this class once the strategy has divided the model.
            vars(one)[name] = functools.partial(_for_engines, one, name)
    return module


_FACTORS = ("set_gradient_divide_factor", "set_reduce_scatter_divide_factor",
            "set_force_sum_reduction_for_comms", "set_custom_reduce_scatter",
            "set_all_reduce_hook")  # fmt: skip
"""Methods of an ``FSDPModule`` that say how gradients are summed."""


def _for_engines(module: Any, name: str, *args: Any, **kwargs: Any) -> None:
    if adoption.inside:
        getattr(type(module), name)(module, *args, **kwargs)
        return
    raise ConfigError(
        f"{name}: the engine sums gradients over ranks, and its step is by their mean. Scale the "
        "loss instead."
    )


class FullyShardedDataParallel:
    """FSDP's wrapper, which gives the module itself back; names of parameters are the module's.

    Its state dicts are whole, of all ranks or of the first alone, whatever type is asked for.

    Raises:
        ConfigError: an option has no counterpart.
    """

    def __new__(
        cls, module: Any, process_group: Any = None, sharding_strategy: Any = None,
        cpu_offload: Any = None, auto_wrap_policy: Any = None, backward_prefetch: Any = None,
        mixed_precision: Any = None, **options: Any,
    ) -> Any:  # fmt: skip
        found = _wrapping(auto_wrap_policy)
        name = getattr(sharding_strategy, "name", "FULL_SHARD")
        if name == "NO_SHARD":
            # Ranks keep buffers of their own under FSDP: no wrapper is called that shares them.
            found = {"name": "ddp"}
        elif name not in _SHARDING:
            raise ConfigError(
                f"the strategy fsdp has no {name}. Use one of {', '.join(_SHARDING)}."
            )
        elif name != "FULL_SHARD":
            found["sharding"] = _SHARDING[name]
        if getattr(cpu_offload, "offload_params", cpu_offload):
            found |= {"cpu_offload": True}
        refused = {"process_group": process_group, **options}
        half = getattr(mixed_precision, "param_dtype", None)
        # Either has the root cast what it is called with.
        casts = ("cast_root_forward_inputs", "cast_forward_inputs")
        _check_casts(casts[0], half, any(getattr(mixed_precision, n, True) for n in casts))
        _tell_of_buffers(module, getattr(mixed_precision, "buffer_dtype", None))
        mesh = options.get("device_mesh")
        where = getattr(mesh, "device_type", None)
        if isinstance(options.get("device_id"), (str, torch.device)):
            where = torch.device(options["device_id"]).type
        return _taken(module, FullyShardedDataParallel, found, half, where, refused, mesh)

    # It is called on the module, which is complete.
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    @property
    def module(self) -> Any:
        """The module itself."""
        return self

    def clip_grad_norm_(self: Any, max_norm: float, norm_type: float = 2.0) -> Any:
        """Have the next step clip the gradient."""
        return clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """A block of backward passes that no step is to follow."""
        return current.accumulating()

    @staticmethod
    def set_state_dict_type(
        module: Any, state_dict_type: Any, state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> None:  # fmt: skip
        """Say which ranks want state dicts."""
        adoption.rank0_only = bool(getattr(state_dict_config, "rank0_only", False))
        own = getattr(optim_state_dict_config, "rank0_only", False)
        adoption.optim_rank0_only = bool(own)

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module: Any, state_dict_type: Any, state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> Iterator[None]:  # fmt: skip
        """Say so within a block."""
        before = adoption.rank0_only, adoption.optim_rank0_only
        FullyShardedDataParallel.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            adoption.rank0_only, adoption.optim_rank0_only = before

    @staticmethod
    def optim_state_dict(model: Any, optim: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The optimizer's whole state, by names. Collective."""
        return named_state_dict(optim, rank0_only=adoption.optim_rank0_only)

    @staticmethod
    def full_optim_state_dict(
        model: Any, optim: Any, optim_input: Any = None, rank0_only: bool = True, group: Any = None
    ) -> dict[str, Any]:
        """Likewise, on the first rank."""
        return named_state_dict(optim, rank0_only=rank0_only)

    @staticmethod
    def optim_state_dict_to_load(
        model: Any, optim: Any, optim_state_dict: Any, load_directly: bool = False, **kwargs: Any
    ) -> Any:
        """The state as it is, which ``optimizer.load_state_dict`` takes."""
        if load_directly:
            load_whole_state_dict(optim, optim_state_dict)
        return optim_state_dict

    @staticmethod
    def summon_full_params(*args: Any, **kwargs: Any) -> Any:
        """Refused."""
        raise ConfigError(
            "summon_full_params: weights are put together in state dicts alone. Read "
            "model.state_dict() on all ranks."
        )


def _taken(
    module: Any, kind: type, found: dict[str, Any], half: Any, where: str | None, options: Any,
    mesh: Any, gives: Any = None,
) -> Any:  # fmt: skip
    if mesh is not None and mesh.size() != current.placement().size:
        raise ConfigError(
            f"FSDP over a mesh of {mesh.size()} of {current.placement().size} ranks has no "
            "counterpart: the strategy fsdp divides over all of them, or by its option `sharding` "
            "in groups that sum gradients. Give the whole mesh, or leave it out."
        )
    if where == "cpu":
        adoption.ask(device="cpu")
    for name in _REFUSED:
        if options.get(name) is not None:
            raise ConfigError(f"FSDP's {name} has no counterpart here. Leave it out.")
    _check_alike(module, half if half in PRECISIONS else None)
    if half not in PRECISIONS:
        # As FSDP does, also where the script has autocast.
        found = {**found, "param_dtype": "fp32"} if found.get("name") != "ddp" else found
    known = adoption.asked.get("strategy", {})
    # As FSDP has it by itself.
    own = {"name": "fsdp", "keep_root": True, **(known if known.get("name") == "fsdp" else {})}
    adoption.ask(strategy=found if found.get("name") == "ddp" else {**own, **found})
    if half in PRECISIONS:
        adoption.ask(precision=PRECISIONS[half])
        adoption.by_policy = True
    if gives is not None or half in PRECISIONS:
        adoption.gives[module] = gives or half
    adoption.gathers = True
    adoption.note_wrapped(module)
    adoption.sums_in_backward = True
    module.__class__ = _class_of(kind, type(module))
    return module


def _check_casts(name: str, half: Any, casts: bool) -> None:
    if half in PRECISIONS and not casts:
        raise ConfigError(
            f"FSDP's mixed precision with {name}=False: the strategy fsdp casts what a model is "
            f"called with to param_dtype ({half}). Leave it out; or leave param_dtype out, and "
            "call the model under torch.autocast, which leaves its inputs as they are."
        )


def _tell_of_buffers(module: nn.Module, dtype: Any) -> None:
    others = [
        name for name, one in module.named_buffers()
        if one.is_floating_point() and one.dtype is not dtype
    ]  # fmt: skip
    if dtype is not None and others:
        adoption.tell(
            "FSDP's mixed precision with buffer_dtype=%s: the strategy leaves buffers (%s) in the "
            "dtype that they have, so what is computed of them is not rounded as there. To have "
            "them rounded, convert them before the model is wrapped.",
            dtype, first_few(others),
        )  # fmt: skip


def _check_alike(module: nn.Module, half: Any) -> None:
    """Refuse a policy that is not that of the modules before."""
    units = [one for one in module.modules() if one is not module and one in adoption.halves]
    within = {id(parameter) for one in units for parameter in one.parameters()}
    if all(id(parameter) in within for parameter in module.parameters()):
        # It computes with nothing itself.
        return
    for other, before in adoption.halves.items():
        if before != half:
            raise ConfigError(
                f"FSDP's policies have {type(other).__name__} compute in {before or 'fp32'}, and "
                f"{type(module).__name__} in {half or 'fp32'}. Strategies compute all that is "
                "trained in one precision. Give all modules one policy; or none, and have "
                "torch.autocast around what is to be in half precision."
            )
    adoption.halves[module] = half


@functools.cache
def _class_of(kind: type, own: type[nn.Module]) -> type:
    told = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    return type(own.__name__, (kind, own), told)


def _wrapping(policy: Any) -> dict[str, Any]:
    """Which modules are units; other policies than these leave that to the strategy."""
    given = getattr(policy, "keywords", {})
    classes = given.get("transformer_layer_cls") or getattr(policy, "_module_classes", None)
    if isinstance(policy, (set, frozenset)):
        classes = policy
    if classes:
        return {"wrap": tuple(sorted(one.__name__ for one in classes))}
    if given.get("min_num_params"):
        return {"wrap_min_params": int(given["min_num_params"])}
    if policy is not None:
        log.info("FSDP's auto_wrap_policy is left to the strategy; results are the same.")
    return {}
