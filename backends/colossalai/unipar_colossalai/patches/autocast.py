"""Layers that are divided by columns do not know autocast in their backward passes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from unipar_colossalai.patches.patch import Patch, Undo


def _autocasting(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(forward)
    def cast(ctx: Any, *args: Any) -> torch.Tensor:
        device_type = args[0].device.type
        if not torch.is_autocast_enabled(device_type):
            return forward(ctx, *args)
        dtype = torch.get_autocast_dtype(device_type)
        # Autocast would keep a rounded weight that no gradient passes, since none is recorded here.
        with torch.autocast(device_type, enabled=False):
            return forward(
                ctx, *(arg.to(dtype) if isinstance(arg, torch.Tensor) else arg for arg in args)
            )

    return cast


def _apply() -> Undo:
    from colossalai.shardformer.layer._operation import (  # pyright: ignore[reportMissingImports]
        LinearWithAsyncCommunication,
    )

    original = LinearWithAsyncCommunication.forward
    LinearWithAsyncCommunication.forward = staticmethod(_autocasting(original))

    def undo() -> None:
        LinearWithAsyncCommunication.forward = staticmethod(original)

    return undo


PATCH = Patch(
    name="autocast-linear",
    target="colossalai.shardformer.layer._operation:LinearWithAsyncCommunication",
    source="0c3730847d479fdf438e2ea583d9d36f0ff2bceaddec073bcfd42cd1f06a8921",
    reason="colossalai/shardformer/layer/_operation.py, LinearWithAsyncCommunication: under "
    "autocast its forward computes in half precision and keeps fp32 tensors for its backward, "
    "where two dtypes meet in one product, which is an error",
    device_types=frozenset({"cpu", "cuda"}),
    plugins=frozenset({"hybrid"}),
    apply=_apply,
)
