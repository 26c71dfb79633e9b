"""The optimizer of an engine, built over parameters in their final form."""

from __future__ import annotations

import contextlib

from torch import nn
from torch.optim import Optimizer

from unipar.engine.sparse import sparse_parameters
from unipar.optimizers.fused import fused_by_default
from unipar.strategy import EngineSpec


def build_optimizer(
    spec: EngineSpec, module: nn.Module, *, may_fuse: bool = False
) -> Optimizer | None:
    """The optimizer that the user asked for, over parameters in their final form.

    Args:
        spec: what the user asked for.
        module: with the parameters.
        may_fuse: whether one that is chosen by name may be a fused one on GPUs: it steps these
            parameters themselves, not what a framework puts in their places.
    """
    if spec.optimizer is None:
        return None
    fusing = fused_by_default(sparse_parameters(module)) if may_fuse else contextlib.nullcontext()
    with fusing:
        return spec.optimizer(module.named_parameters())
