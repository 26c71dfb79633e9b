"""Summing where PyTorch would average."""

from __future__ import annotations

from torch import nn


def sum_shards(module: nn.Module) -> None:
    """Let FSDP2 sum the gradients of each part over that part's own mesh, undivided.

    The default divides by the size of the mesh, so parts on meshes of different sizes (experts
    beside dense layers) would be weighted differently.

    Args:
        module: what ``fully_shard`` was called for, with all parts of it that it was called for.
    """
    # Importing it takes as long as torch, and only what shards needs it.
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            # A factor alone asks for a pre-multiplied sum, which is NCCL's and not gloo's.
            part.set_force_sum_reduction_for_comms(True)
