"""In a pipeline, Qwen2 masks other tokens than transformers' Qwen2 does."""

from __future__ import annotations

from typing import Any

from unipar_colossalai.patches.patch import Patch, Undo

_MASKS = ("_prepare_4d_causal_attention_mask", "_prepare_4d_causal_attention_mask_for_sdpa")


def _as_it_is(attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
    return attention_mask


def _apply() -> Undo:
    import colossalai.shardformer.modeling.qwen2 as modeling  # pyright: ignore
    import torch

    forwards = modeling.Qwen2PipelineForwards
    original = forwards.qwen2_model_forward
    masks = {name: getattr(modeling, name) for name in _MASKS}

    def qwen2_model_forward(
        self: Any, *, input_ids: Any, attention_mask: Any, hidden_states: Any, **given: Any
    ) -> Any:
        if hidden_states is not None:
            shape = hidden_states.shape[:2]
        elif input_ids is not None:
            shape = input_ids.shape
        else:
            shape = given["inputs_embeds"].shape[:2]
        # What is asked of it is its shape, dtype and device.
        like = torch.empty(*shape, 0, dtype=self.dtype, device=self.device)
        positions = torch.arange(shape[1], device=self.device)
        mask = self._update_causal_mask(attention_mask, like, positions, None)
        return original(
            self,
            input_ids=input_ids,
            attention_mask=mask,
            hidden_states=hidden_states,
            **given,
        )

    forwards.qwen2_model_forward = staticmethod(qwen2_model_forward)
    for name in _MASKS:
        setattr(modeling, name, _as_it_is)

    def undo() -> None:
        forwards.qwen2_model_forward = staticmethod(original)
        for name in _MASKS:
            setattr(modeling, name, masks[name])

    return undo


PATCH = Patch(
    name="qwen2-masks",
    target="colossalai.shardformer.modeling.qwen2:Qwen2PipelineForwards.qwen2_model_forward",
    source="d9cda8c1828e9f730b63fbb9c9c41915977cb0548b4136e3ac8cb026e4949608",
    reason="colossalai/shardformer/modeling/qwen2.py, qwen2_model_forward, makes its mask by other "
    "functions than the model, without the sliding window in PyTorch's attention, and with another "
    "result for tokens that see none",
    device_types=frozenset({"cpu", "cuda"}),
    plugins=frozenset({"hybrid"}),
    apply=_apply,
)
