"""The changes that Colossal-AI needs in memory: the fewest that serve, each in a module of its own.

They are made when a run sets the strategy up, only those that its device and plugin need, and are
taken back when it ends.
"""

from __future__ import annotations

from unipar_colossalai.patches import (
    attributes,
    autocast,
    batchnorm,
    chunks,
    device,
    dropout,
    gpt2_labels,
    gpt2_logits,
    gpt2_masks,
    monitor,
    optimizers,
    p2p,
    qwen2_logits,
    qwen2_masks,
    sanity,
    set_device,
    strided,
)
from unipar_colossalai.patches.patch import Patch, Undo

ALL: tuple[Patch, ...] = (
    batchnorm.PATCH,
    sanity.PATCH,
    chunks.PATCH,
    device.PATCH,
    attributes.PATCH,
    monitor.PATCH,
    optimizers.PATCH,
    strided.PATCH,
    p2p.PATCH,
    autocast.PATCH,
    gpt2_logits.PATCH,
    gpt2_masks.PATCH,
    gpt2_labels.PATCH,
    dropout.PATCH,
    *set_device.PATCHES,
    qwen2_logits.PATCH,
    qwen2_masks.PATCH,
)


def apply(device_type: str, plugin: str) -> list[Undo]:
    """Make the changes that a run needs; what takes each of them back, in order."""
    return [patch.apply() for patch in ALL if patch.needed(device_type, plugin)]


__all__ = ["ALL", "Patch", "Undo", "apply"]
