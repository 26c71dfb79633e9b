"""In a pipeline, some models set CUDA's device before their layers, and on a CPU there is none."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

from unipar_colossalai.patches.host import HostTorch
from unipar_colossalai.patches.patch import Patch, Undo


def _apply(name: str) -> Undo:
    modeling: Any = import_module(f"colossalai.shardformer.modeling.{name}")
    original = modeling.torch
    modeling.torch = HostTorch(set_device=lambda device: None)

    def undo() -> None:
        modeling.torch = original

    return undo


def _patch(name: str, function: str, source: str) -> Patch:
    return Patch(
        name=f"{name}-on-cpu",
        target=f"colossalai.shardformer.modeling.{name}:{function}",
        source=source,
        reason=f"colossalai/shardformer/modeling/{name}.py, {function}, calls "
        "torch.cuda.set_device",
        device_types=frozenset({"cpu"}),
        plugins=frozenset({"hybrid"}),
        apply=partial(_apply, name),
    )


PATCHES = (
    _patch(
        "gpt2",
        "GPT2PipelineForwards.gpt2_model_forward",
        "7ead2903f4022a40a9f503cad4cea3e91f9fde92d97ce9519e21462b7079444e",
    ),
    _patch(
        "gptj",
        "GPTJPipelineForwards.gptj_model_forward",
        "e6f942321f0ef1db0380e4c14bf05b1d66ca31adb451015f8d3b77f5ea30365b",
    ),
)
