"""Tensors that an operation changes in place, and the memory that they are views of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

# Torch 2.13, native_functions.yaml: running statistics are changed, and not marked so.
_UNMARKED = dict.fromkeys(
    ("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"),
    ("running_mean", "running_var"),
)


def written_by(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield those arguments that an operation writes to: tensors, or lists of them.

    Args:
        operation: as a ``TorchDispatchMode`` is given it.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    schema = operation._schema
    unmarked = _UNMARKED.get(schema.name, ())
    if not schema.is_mutable and not unmarked:
        return
    given = {**dict(zip((one.name for one in schema.arguments), args, strict=False)), **kwargs}
    for one in schema.arguments:
        marked = one.alias_info is not None and one.alias_info.is_write
        if marked or one.name in unmarked:
            yield given.get(one.name)


def storages(values: Any) -> dict[int, torch.UntypedStorage]:
    """The storages of tensors, or of what they are made of: a DTensor has another for each view.

    Args:
        values: a tensor, or containers of tensors.

    Returns:
        Them by what tells them apart: equal numbers are the same memory while both are held.
    """
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in (one for one in tree_leaves(values) if isinstance(one, torch.Tensor)):
        if is_traceable_wrapper_subclass(tensor):
            for name in tensor.__tensor_flatten__()[0]:
                found |= storages(getattr(tensor, name))
        else:
            storage = tensor.untyped_storage()
            # Not its address, which tensors of tensors have not (torch 2.13, storage.py).
            found[storage._cdata] = storage
    return found
