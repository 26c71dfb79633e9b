"""In a pipeline, GPT-2 with PyTorch's attention looks ahead, and no mask at all is an error."""

from __future__ import annotations

from typing import Any

from unipar_colossalai.patches.patch import Patch, Undo


def _apply() -> Undo:
    import colossalai.shardformer.modeling.gpt2 as modeling  # pyright: ignore
    from transformers.modeling_attn_mask_utils import _prepare_4d_causal_attention_mask_for_sdpa

    original = modeling._get_attention_mask

    def _get_attention_mask(
        self: Any,
        shard_config: Any,
        hidden_states: Any,
        past_key_values: Any,
        attention_mask: Any,
        encoder_hidden_states: Any,
        encoder_attention_mask: Any,
    ) -> tuple[Any, Any]:
        if self.config._attn_implementation == "sdpa":
            # As in transformers: a mask beside which PyTorch's attention is not causal by itself.
            shape = hidden_states.shape[:2]
            mask = _prepare_4d_causal_attention_mask_for_sdpa(
                attention_mask, shape, hidden_states, 0
            )
            return mask, None
        if attention_mask is None:
            return None, None
        return original(
            self,
            shard_config,
            hidden_states,
            past_key_values,
            attention_mask,
            encoder_hidden_states,
            encoder_attention_mask,
        )

    modeling._get_attention_mask = _get_attention_mask

    def undo() -> None:
        modeling._get_attention_mask = original

    return undo


PATCH = Patch(
    name="gpt2-masks",
    target="colossalai.shardformer.modeling.gpt2:_get_attention_mask",
    source="5a9ed595fd774fa494f927d3d4be0cecede203496f301dd1c928b2ad1e7588d2",
    reason="colossalai/shardformer/modeling/gpt2.py, _get_attention_mask, asks a mask for its size "
    "before it asks whether there is one, and masks padding alone, which PyTorch's attention takes "
    "for all that is masked",
    device_types=frozenset({"cpu", "cuda"}),
    plugins=frozenset({"hybrid"}),
    apply=_apply,
)
