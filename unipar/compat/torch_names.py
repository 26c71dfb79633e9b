"""What the face of PyTorch has in the place of PyTorch's own names; everything else is the same."""

from __future__ import annotations

from unipar.compat.tables import Row, Table

FACE = "unipar.compat.torch"
_NATIVE = "unipar.compat.native"

REPLACED: dict[str, tuple[str, str]] = {
    "torch": (f"{_NATIVE}.calls", "compile save"),
    "torch.nn": (f"{_NATIVE}.wrappers", "DataParallel SyncBatchNorm"),
    "torch.nn.parallel": (f"{_NATIVE}.wrappers", "DataParallel DistributedDataParallel"),
    "torch.nn.parallel.data_parallel": (f"{_NATIVE}.wrappers", "DataParallel"),
    "torch.nn.parallel.distributed": (f"{_NATIVE}.wrappers", "DistributedDataParallel"),
    "torch.nn.utils": (f"{_NATIVE}.calls", "clip_grad_norm_ clip_grad_value_"),
    "torch.nn.utils.clip_grad": (f"{_NATIVE}.calls", "clip_grad_norm_ clip_grad_value_"),
    "torch.distributed": (f"{_NATIVE}.calls", "destroy_process_group init_process_group"),
    "torch.distributed.optim": (f"{_NATIVE}.wrappers", "ZeroRedundancyOptimizer"),
    "torch.distributed.algorithms.join": (f"{_NATIVE}.wrappers", "Join"),
    "torch.amp": (f"{_NATIVE}.scaling", "GradScaler"),
    "torch.amp.grad_scaler": (f"{_NATIVE}.scaling", "GradScaler"),
    "torch.cuda.amp": (f"{_NATIVE}.scaling", "GradScaler"),
    "torch.cuda.amp.grad_scaler": (f"{_NATIVE}.scaling", "GradScaler"),
    "torch.utils.data": (f"{_NATIVE}.data", "DataLoader"),
    "torch.utils.data.dataloader": (f"{_NATIVE}.data", "DataLoader"),
}
"""By module of PyTorch: the module that has the face's, and their names."""


def holds_face(module: str) -> bool:
    """Whether a module of PyTorch, or one below it, has names that the face replaces."""
    return any(one == module or one.startswith(f"{module}.") for one in REPLACED)
