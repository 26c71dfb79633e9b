"""In a pipeline, GPT-2 without labels fails, so that there is no loss but its own."""

from __future__ import annotations

from typing import Any

from unipar_colossalai.patches.patch import Patch, Undo


def _apply() -> Undo:
    from colossalai.shardformer.modeling.gpt2 import (  # pyright: ignore[reportMissingImports]
        GPT2PipelineForwards,
    )
    from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

    original = GPT2PipelineForwards.gpt2_lmhead_model_forward

    def gpt2_lmhead_model_forward(self: Any, labels: Any = None, **given: Any) -> Any:
        if labels is not None or not given["stage_manager"].is_last_stage():
            return original(self, labels=labels, **given)
        outputs = GPT2PipelineForwards.gpt2_model_forward(self.transformer, **given)
        return CausalLMOutputWithCrossAttentions(logits=self.lm_head(outputs[0]))

    GPT2PipelineForwards.gpt2_lmhead_model_forward = staticmethod(gpt2_lmhead_model_forward)

    def undo() -> None:
        GPT2PipelineForwards.gpt2_lmhead_model_forward = staticmethod(original)

    return undo


PATCH = Patch(
    name="gpt2-without-labels",
    target="colossalai.shardformer.modeling.gpt2:GPT2PipelineForwards.gpt2_lmhead_model_forward",
    source="5e3e13bb6b2dd81b3d2f4c945880b23540c82aee46f007276791ed2295b47533",
    reason="colossalai/shardformer/modeling/gpt2.py, gpt2_lmhead_model_forward, returns a variable "
    "that it sets only where there are labels",
    device_types=frozenset({"cpu", "cuda"}),
    plugins=frozenset({"hybrid"}),
    apply=_apply,
)
