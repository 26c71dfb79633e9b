"""Other tensors in the places of parameters that ranks divide: taken over, or refused.

FSDP2 goes on with those that it made, whatever a script puts there (torch 2.13,
distributed/fsdp/_fully_shard/_fsdp_param.py).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from unipar.engine.weights import other_weights
from unipar.errors import ConfigError
from unipar.utils.torch_versions import sharded_groups

_DATA: Any = torch.Tensor.data


_known = WeakTensorKeyDictionary()
"""What FSDP keeps of each shard, and how messages name it and its strategy."""

_lent: ContextVar[bool] = ContextVar("_lent", default=False)


@contextlib.contextmanager
def lending_places() -> Iterator[None]:
    """Let passes be by other tensors that this package puts in the places of parameters."""
    token = _lent.set(True)
    try:
        yield
    finally:
        _lent.reset(token)


def keep_in_place(root: nn.Module, strategy: str) -> list[Callable[[], None]]:
    """Have a model take over what ``parameter.data`` is given, and FSDP refuse others in passes.

    Args:
        root: with parameters that are DTensors, and all parts that ``fully_shard`` was called for.
        strategy: as the user calls it.

    Returns:
        What takes the refusal back. What ``parameter.data`` is given is taken over as long as there
        is the parameter.
    """
    # Importing it takes as long as torch, and only what shards needs it.
    from torch.distributed.fsdp import FSDPModule

    DTensor.data = property(_DATA.__get__, _set_data)  # pyright: ignore[reportAttributeAccessIssue]
    names = {one: name for name, one in root.named_parameters()}
    divided = {one: name for one, name in names.items() if isinstance(one, DTensor)}
    _known.update({one: (_nothing, name, strategy) for one, name in divided.items()})
    undo: list[Callable[[], None]] = []
    for part in root.modules():
        if isinstance(part, FSDPModule):
            kept = [one for group in sharded_groups(part) for one in group.fsdp_params]
            own = [(one, names[one.sharded_param]) for one in kept]
            _known.update(
                {one.sharded_param: (weakref.ref(one), name, strategy) for one, name in own}
            )
            look: Any = torch.compiler.disable(partial(_refuse_others, own, strategy))
            # Before FSDP's own, which puts what it has gathered there.
            undo.append(part.register_forward_pre_hook(look, prepend=True).remove)
    return undo


def _nothing() -> None:
    """What FSDP keeps of a parameter that it does not gather."""


def _set_data(self: Any, new: Any) -> None:
    """What ``parameter.data = new`` does, also for a DTensor.

    Torch changes nothing that a DTensor's attributes say, nor the memory that FSDP gathers.
    """
    known: Any = _known.get(self)
    if known is None:
        _DATA.__set__(self, new)
        return
    ref, name, strategy = known
    alike = isinstance(new, DTensor) and (
        (new.device_mesh, new.placements, new.shape, new.dtype, new.device)
        == (self.device_mesh, self.placements, self.shape, self.dtype, self.device)
    )
    local = new._local_tensor.detach() if alike else self._local_tensor
    storage = local.untyped_storage()
    if not alike or not local.is_contiguous() or not storage.resizable():
        what = "a DTensor of another layout" if isinstance(new, DTensor) else "a whole tensor"
        raise ConfigError(
            f"parameter.data of '{name}' was given {what}. Under strategy '{strategy}' this rank "
            "holds a part of the parameter, and it takes what is made of such: p.data = "
            "p.data.clamp(-1, 1), or an average that began as p.detach().clone() once the model "
            "was prepared. To put whole weights there, use a strategy that leaves weights whole, "
            "such as ddp."
        )
    if (kept := ref()) is not None:
        # All ranks send as many rows as the first has. The memory stays that of what was given,
        # which changes with the parameter, as in PyTorch.
        size = kept._sharded_param_data.numel()
        needed = (local.storage_offset() + size) * local.itemsize
        if storage.nbytes() < needed:
            storage.resize_(needed)
        kept._sharded_param_data = local.as_strided((size,), (1,))
    self._local_tensor = local


def _refuse_others(
    own: Sequence[tuple[Any, str]], strategy: str, module: nn.Module, args: Any
) -> None:
    """Refuse a forward pass that would not be by what has the places of parameters."""
    if _lent.get():
        return
    others = []
    for kept, name in own:
        place = kept._module_info
        there = place.module._parameters.get(place.param_name)
        if there is kept.sharded_param:
            continue
        # As FSDP may have them there, of torch 2.8 to 2.13, too.
        gathered = ("_unsharded_param", "_sharded_post_forward_param")
        if there is None or all(there is not getattr(kept, one, None) for one in gathered):
            others.append(name)
    if others:
        raise other_weights(others, strategy)
