"""The loss of a micro-batch without any label has gradients that are not numbers."""

from __future__ import annotations

from typing import Any

import torch

from unipar_colossalai.patches.patch import Patch, Undo

_IGNORED = -100


def _apply() -> Undo:
    import colossalai.shardformer.modeling.llama as llama  # pyright: ignore[reportMissingImports]

    original = llama.dist_cross_entropy

    def dist_cross_entropy(labels: Any, logits: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if (labels[..., 1:] != _IGNORED).any():
            return original(labels, logits, *args, **kwargs)
        # As PyTorch's own: no mean, and no gradient.
        return logits.sum() * 0.0 + torch.nan

    llama.dist_cross_entropy = dist_cross_entropy

    def undo() -> None:
        llama.dist_cross_entropy = original

    return undo


PATCH = Patch(
    name="no-labels",
    target="colossalai.shardformer.layer.loss:dist_cross_entropy",
    source="13a8faa247bfc7c424fe780b00d85c87d3f55346cab76a0dfe4fce0ac6c83877",
    reason="colossalai/shardformer/layer/loss.py, dist_cross_entropy, divides a sum by the number "
    "of labels, of which there may be none in a micro-batch",
    device_types=frozenset({"cpu", "cuda"}),
    plugins=frozenset({"hybrid"}),
    apply=_apply,
)
