"""Random numbers for parameters that ranks have shards of: those that the whole ones would get.

Torch draws each rank's own numbers for its shard. On CPUs ranks with one seed then draw the same
ones for different rows, and on GPUs others than for the whole tensor (torch 2.13,
distributed/tensor/_dispatch.py, ``_random_ops``), so what a loop does to weights by chance, as
``nn.init.normal_(layer.weight)`` in the midst of training, would depend on how they are divided.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import wait_tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from unipar.state import LocalState

_ATEN = torch.ops.aten
_FILLS = (
    _ATEN.bernoulli_.float,
    _ATEN.bernoulli_.Tensor,
    _ATEN.cauchy_.default,
    _ATEN.exponential_.default,
    _ATEN.geometric_.default,
    _ATEN.log_normal_.default,
    _ATEN.normal_.default,
    _ATEN.random_.default,
    _ATEN.random_.to,
    getattr(_ATEN.random_, "from"),
    _ATEN.uniform_.default,
)
_LIKE = (
    _ATEN.bernoulli.p,
    _ATEN.rand_like.default,
    _ATEN.randint_like.default,
    _ATEN.randint_like.low_dtype,
    _ATEN.randn_like.default,
)
_BY_VALUE = (
    _ATEN.bernoulli.default,
    _ATEN.native_dropout.default,
    _ATEN.normal.Tensor_Tensor,
    _ATEN.normal.Tensor_float,
    _ATEN.poisson.default,
)
_shards = WeakTensorKeyDictionary()


def draw_for_whole(shards: Any) -> None:
    """Draw for the whole of these parameters, and of what is divided as they are, from now on.

    Rank 0's numbers count, as those of a model that one process has: each of the ranks draws, so
    that its generator moves on as it would for a replica. Drawing is collective, then.

    Args:
        shards: parameters, ``DTensor``. Others, as activations that a model divides, are torch's.
    """
    _shards.update(dict.fromkeys(shards, True))
    # As unipar.engine.sharded does.
    handlers = DTensor._op_dispatcher._custom_op_handlers  # pyright: ignore[reportAttributeAccessIssue]
    handlers.update(dict.fromkeys((*_FILLS, *_LIKE, *_BY_VALUE), _draw))


def _draw(op: Any, args: Any, kwargs: Any) -> Any:
    one = args[0]
    if one.is_meta or one.device_mesh.size() == 1 or not _is_of_shards(one):
        return _by_torch(op, args, kwargs)
    mesh = one.device_mesh
    with torch.no_grad():
        others = tree_map(_whole, args[1:])
        if op in _BY_VALUE:
            first = _whole(one)
        else:
            # Where a replica would be, also of a shard that is offloaded.
            first = torch.empty(one.shape, dtype=one.dtype, device=mesh.device_type)
        drawn = op(first, *others, **tree_map(_whole, kwargs))
        if op in _FILLS:
            _take(one, drawn)
            return one

        def divided(whole: torch.Tensor) -> Any:
            part: Any = torch.empty_like(one, dtype=whole.dtype)
            return _take(part, whole)

        return tree_map(divided, drawn)


def _is_of_shards(one: DTensor) -> bool:
    """Whether it is a parameter, a view of one, or divided as one."""

    def layout(tensor: DTensor) -> Any:
        return tensor.device_mesh, tensor.placements, tensor.shape

    own, place = layout(one), _place(one)
    return any(own == layout(shard) or place == _place(shard) for shard in _shards)


def _place(one: DTensor) -> int:
    return one._local_tensor.untyped_storage()._cdata


def _by_torch(op: Any, args: Any, kwargs: Any) -> Any:
    handlers = DTensor._op_dispatcher._custom_op_handlers  # pyright: ignore[reportAttributeAccessIssue]
    del handlers[op]
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = _draw


def _whole(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    # What ``full_tensor`` does below autograd, which torch 2.8 does not call in a dispatch.
    replicated = DTensorSpec(
        value.device_mesh, (Replicate(),) * value.device_mesh.ndim, value._spec.tensor_meta
    )
    return wait_tensor(redistribute_local_tensor(value._local_tensor, value._spec, replicated))


def _take(one: DTensor, drawn: torch.Tensor) -> DTensor:
    """Put this rank's part of what rank 0 has drawn into a tensor. Collective."""
    drawn = drawn.contiguous()
    for dim in range(one.device_mesh.ndim):
        group = one.device_mesh.get_group(dim)
        dist.broadcast(drawn, src=dist.get_global_rank(group, 0), group=group)
    LocalState.of("", one).take(drawn)
    return one
