"""Differences between the supported versions of torch; no other file asks for the version.

What a torch has is seen by looking, for builds between two versions have some of the next one's;
numbers are for messages. All else that unipar calls is in every version.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import sys
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from unipar.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def all_gather(received: torch.Tensor, sent: torch.Tensor, **how: Any) -> Any:
    """``torch.distributed.all_gather_single``, by the name that this version has for it."""
    # torch 2.13 has renamed all_gather_into_tensor, and warns of the older name.
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    return getattr(dist, name)(received, sent, **how)


def meta_device() -> torch.device:
    """Return the meta device, to build models under whose functions may import what they need."""
    # torch 2.8, _dynamo/variables/torch_function.py: its import computes with tensors, and where
    # there is a default device that asks for torch._dynamo again. transformers imports it with a
    # class of models. 2.11 can; an import too many does no harm, so here a number will do.
    if TorchVersion(torch.__version__) < "2.11":
        importlib.import_module("torch._dynamo")
    return torch.device("meta")


def forget_meshes(ended: Collection[DeviceMesh] = ()) -> None:
    """Let DTensors forget meshes whose process groups are gone, or will be.

    Args:
        ended: of which nothing is to be kept, slices included.

    torch 2.13 keeps what operations give, and the mesh of it, for as long as the process lives;
    a later mesh of the same ranks is equal to it, and its results would have groups that are
    closed, or others of the same name. A group that is kept keeps its threads, too, and those of
    gloo wake a hundred times a second (gloo, transport/tcp/loop.cc).
    """
    if ended:
        # torch 2.8, distributed/device_mesh.py, _MeshEnv; in 2.11 a mesh has these itself.
        resources = getattr(sys.modules["torch.distributed.device_mesh"], "_mesh_resources", None)
        for name in (
            "child_to_root_mapping",
            "root_to_flatten_mapping",
            "flatten_name_to_root_dims",
        ):
            known = getattr(resources, name, {})
            for mesh, other in list(known.items()):
                if any(mesh is one or other is one for one in ended):
                    del known[mesh]
    if "torch.distributed.tensor" not in sys.modules:
        return
    tensors = [m for name, m in sys.modules.items() if name.startswith("torch.distributed.tensor")]
    # _gen_transform_infos, MeshTopoInfo.build_from_mesh, ShardingPropagator's; others elsewhere.
    for module in tensors:
        for value in vars(module).values():
            for one in (value, *(vars(value).values() if isinstance(value, type) else ())):
                if isinstance(one := getattr(one, "__func__", one), _CACHED):
                    one.cache_clear()
    # 2.8, _sharding_prop.py: an attribute, of which debug/__init__.py has no function yet.
    dispatcher: Any = sys.modules["torch.distributed.tensor"].DTensor._op_dispatcher
    dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    # And dictionaries: debug/__init__.py, _redistribute.py, some only since 2.11.
    for name, function in (
        ("debug", "_clear_sharding_prop_cache"),
        ("_redistribute", "clear_redistribute_planner_cache"),
    ):
        module = importlib.import_module(f"torch.distributed.tensor.{name}")
        if clear := getattr(module, function, None):
            clear()


_CACHED = type(functools.cache(lambda: None))


def sharded_groups(module: Any) -> list[Any]:
    """Return what FSDP2 keeps of the parameters that it gathers with a module."""
    # torch 2.13, distributed/fsdp/_fully_shard/_fsdp_state.py; until 2.11 there is one group.
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def precisions_kept(module: Any) -> list[tuple[Any, str]]:
    """Return what keeps the precision of an FSDP2 module, and the attribute that does."""
    # torch 2.15, distributed/fsdp/_fully_shard/_fsdp_param_group.py: what parameters are gathered
    # in is kept by each of them; until 2.13 by their group, and theirs is only handed on.
    groups = sharded_groups(module)
    parts = [*groups, *(parameter for group in groups for parameter in group.fsdp_params)]
    return [
        (module._get_fsdp_state(), "_mp_policy"),
        *((part, "mp_policy") for part in parts if hasattr(part, "mp_policy")),
    ]


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Leave TF32 out on GPUs, whatever the run allows, also where PyTorch has it by default.

    Convolutions and recurrent layers keep it where it was set for one of them alone.
    """
    # torch 2.9 has the first of these names, and does not mix it with the second.
    products: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    newer = hasattr(products, "fp32_precision")
    name, exact = ("fp32_precision", "ieee") if newer else ("allow_tf32", False)
    before, allowed = getattr(products, name), False
    # It cannot be read where its two parts differ.
    with contextlib.suppress(RuntimeError):
        allowed = cudnn.allow_tf32
    setattr(products, name, exact)
    if allowed:
        cudnn.allow_tf32 = False
    try:
        yield
    finally:
        setattr(products, name, before)
        if allowed:
            cudnn.allow_tf32 = True


def precision_of_fp32() -> dict[str, Any]:
    """Return how fp32 is computed on GPUs, by the names of torch's settings below ``backends``."""
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        # torch 2.9. Convolutions and recurrent layers are told apart, and from all others.
        names = [f"{one}.fp32_precision" for one in ("cuda.matmul", "cudnn.conv", "cudnn.rnn")]
    else:
        names = [f"{one}.allow_tf32" for one in ("cuda.matmul", "cudnn")]
    return {name: operator.attrgetter(name)(torch.backends) for name in names}


def set_precision_of_fp32(settings: dict[str, Any]) -> None:
    """Set what :func:`precision_of_fp32` has returned in another process, where it differs."""
    own = precision_of_fp32()
    for name, value in settings.items():
        if value != own[name]:
            where, _, last = name.rpartition(".")
            setattr(operator.attrgetter(where)(torch.backends), last, value)


def actions_within(action: Any) -> tuple[Any, ...]:
    """Return what a rank does at once, by an entry of a table of torch's pipelines."""
    # torch 2.11, distributed/pipelining/schedules.py: one may hold others; none of 2.8's does.
    return getattr(action, "sub_actions", None) or (action,)


def kind_of(action: Any) -> str:
    """Return the letter of a pass, or the name of a transfer, in such a table."""
    # torch 2.11, distributed/pipelining/schedules.py: values are these; those of 2.8 are numbers,
    # and it prints as them.
    kind = action.computation_type
    return kind.value if isinstance(kind.value, str) else str(kind)


def check_split_passes(schedule: str) -> None:
    """Let no pipeline begin that splits backward passes where torch does so wrongly.

    Args:
        schedule: as the user calls it.

    Raises:
        ConfigError: this torch gives other gradients.
    """
    if not splits_backward_passes():
        raise ConfigError(
            f"mesh: schedule='{schedule}' computes gradients of weights later than those of "
            f"inputs. Torch {torch.__version__} gives wrong ones then, where a weight is used "
            "twice. Set schedule='1f1b' or 'interleaved', or use torch 2.13 or newer."
        )


@functools.cache
def splits_backward_passes() -> bool:
    """Return whether gradients of weights are right when they are computed after those of inputs.

    torch 2.11, distributed/pipelining/_backward.py, ``stage_backward_weight``: where one use of a
    weight follows another, gradients pass through both twice. 2.13 has it right.
    """
    backward = importlib.import_module("torch.distributed.pipelining._backward")
    with torch.enable_grad():
        given = torch.ones(1, device="cpu", requires_grad=True)
        weight = torch.nn.Parameter(torch.ones(1, device="cpu"))
        output = (given * weight).sin() * weight
        (expected,) = torch.autograd.grad(output, weight, retain_graph=True)
        _, groups = backward.stage_backward_input(
            [output], [torch.ones_like(output)], [given], iter([weight])
        )
        backward.stage_backward_weight(iter([weight]), groups)
    return weight.grad is not None and torch.allclose(weight.grad, expected)


def reset_passes(root: Any, strategy: str) -> None:
    """Let FSDP2 forget passes that an error has ended.

    Args:
        root: the outermost module that ``fully_shard`` was called for.
        strategy: as the user calls it.

    Raises:
        ConfigError: it was in a forward pass, and this torch cannot go on after that.
    """
    state = root._get_fsdp_state()
    if state._is_root is None:
        # Until its first forward pass it has nothing to forget, and 2.13 fails for want of it.
        return
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    # torch 2.11, distributed/fsdp/_fully_shard/_fsdp_state.py: it is there until that pass ends.
    elif state._state_ctx.iter_forward_root is not None:
        raise ConfigError(
            f"the last step ended with an error in the model's forward pass, and under strategy "
            f"'{strategy}' torch {torch.__version__} cannot go on after that. Begin again from a "
            "checkpoint, or use torch 2.13 or newer."
        )


@contextlib.contextmanager
def recovering(module: Any, strategy: str) -> Iterator[None]:
    """Around a forward and backward pass under FSDP2 that may run out of memory.

    Args:
        module: the root of what ``fully_shard`` was called for.
        strategy: as the user calls it.

    Raises:
        ConfigError: this torch could not go on after that.
    """
    # torch 2.13, distributed/fsdp/_fully_shard/_fully_shard.py; 2.11 has nothing of the kind.
    if not hasattr(module, "reset_iter_state"):
        raise ConfigError(
            "micro_batch_size='auto' and shares='auto' try passes, and under strategy "
            f"'{strategy}' torch {torch.__version__} cannot go on after one that did not fit in "
            "memory. Give numbers, or use torch 2.13 or newer."
        )
    try:
        yield
    finally:
        # After running out of memory in a forward pass, parameters are still gathered.
        reset_passes(module, strategy)


def check_torchao() -> None:
    """Let no run begin that needs torchao beside a torch that it cannot be imported with.

    Raises:
        ConfigError: this is one.
    """
    # torchao 0.18, quantization/quantize_/workflows/float8/float8_tensor.py, imports it from
    # torch.nn.functional, where 2.8 has none; torchao itself asks for 2.11.
    if not hasattr(torch.nn.functional, "ScalingType"):
        raise ConfigError(
            "precision='fp8' needs torchao, and torchao 0.18 cannot be imported under torch "
            f"{torch.__version__}. Use torch 2.11 or newer, or precision='bf16'."
        )


def check_arguments_kept(tensor: Any) -> None:
    """Let nothing go on that computes with DTensors otherwise than element by element. Collective.

    Args:
        tensor: a DTensor of what is to be computed with.

    Raises:
        RuntimeError: operations of this torch may take arguments of earlier ones.
    """
    # torch 2.8, distributed/tensor/_op_schema.py, OpSchema.__hash__: what redistributes is cached,
    # and keyword arguments are not part of the key. 2.11 has it right.
    nothing: Any = torch.zeros_like(tensor).norm()
    at_least = [nothing.clamp(min=bound).full_tensor().item() for bound in (2.0, 1.0)]
    if at_least != [2.0, 1.0]:
        raise RuntimeError(
            f"DTensors of torch {torch.__version__} take arguments of earlier operations; those of "
            "torch 2.11 do not"
        )
