"""In a pipeline, GPT-2 sets CUDA's device before each layer, and on a CPU there is none."""

from __future__ import annotations

from unipar_colossalai.patches.host import HostTorch
from unipar_colossalai.patches.patch import Patch, Undo


def _apply() -> Undo:
    import colossalai.shardformer.modeling.gpt2 as modeling  # pyright: ignore

    original = modeling.torch
    modeling.torch = HostTorch(set_device=lambda device: None)

    def undo() -> None:
        modeling.torch = original

    return undo


PATCH = Patch(
    name="gpt2-on-cpu",
    target="colossalai.shardformer.modeling.gpt2:GPT2PipelineForwards.gpt2_model_forward",
    source="7ead2903f4022a40a9f503cad4cea3e91f9fde92d97ce9519e21462b7079444e",
    reason="colossalai/shardformer/modeling/gpt2.py, gpt2_model_forward, calls "
    "torch.cuda.set_device",
    device_types=frozenset({"cpu"}),
    plugins=frozenset({"hybrid"}),
    apply=_apply,
)
