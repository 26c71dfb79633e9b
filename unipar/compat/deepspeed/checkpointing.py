"""``deepspeed.checkpointing``: activations that are computed again in the backward pass."""

from __future__ import annotations

from typing import Any

from torch.utils import checkpoint as torchs

from unipar.compat.deepspeed_names import CHECKPOINTING


def checkpoint(function: Any, *args: Any) -> Any:
    """Call a function whose activations are not kept.

    As in DeepSpeed its weights get gradients only if one of its arguments needs them, of which
    torch warns.
    """
    return torchs.checkpoint(function, *args, use_reentrant=True)


def non_reentrant_checkpoint(function: Any, *args: Any) -> Any:
    """Call a function whose activations are not kept, and whose weights get gradients always."""
    return torchs.checkpoint(function, *args, use_reentrant=False)


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Nothing: no activations are divided or moved."""


def is_configured() -> bool:
    """Always."""
    return True


def reset() -> None:
    """Nothing."""


def set_num_layers(nlayers: int) -> None:
    """Nothing."""


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Nothing: no activations are divided."""


__getattr__ = CHECKPOINTING.refusing(__name__)
