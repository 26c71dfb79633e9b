"""Qwen2's head is divided without padding the vocabulary, and its logits stay divided."""

from __future__ import annotations

from typing import Any

from unipar_colossalai.patches.patch import Patch, Undo


def _apply() -> Undo:
    import colossalai.shardformer.policies.qwen2 as policies  # pyright: ignore
    from colossalai.shardformer.layer import (  # pyright: ignore[reportMissingImports]
        PaddingLMHead,
        VocabParallelLMHead1D,
    )
    from colossalai.shardformer.policies.base_policy import (  # pyright: ignore
        ModulePolicyDescription,
        SubModuleReplacementDescription,
    )

    original = policies.Qwen2ForCausalLMPolicy.module_policy

    def module_policy(self: Any) -> Any:
        policy = original(self)
        config = self.shard_config
        padding = {"make_vocab_size_divisible_by": config.make_vocab_size_divisible_by}
        if config.enable_tensor_parallelism:
            head = SubModuleReplacementDescription(
                "lm_head",
                VocabParallelLMHead1D,
                {"gather_output": not config.parallel_output, **padding},
            )
        else:
            head = SubModuleReplacementDescription("lm_head", PaddingLMHead, padding)
        # Its name, where transformers has dropped one of the classes that the module imports.
        described = policy.setdefault(policies.Qwen2ForCausalLM, ModulePolicyDescription())
        described.sub_module_replacement = [head]
        if not (config.parallel_output or self.pipeline_stage_manager):
            # From whole logits, transformers' own forward computes the loss.
            described.method_replacement = None
        return policy

    policies.Qwen2ForCausalLMPolicy.module_policy = module_policy

    def undo() -> None:
        policies.Qwen2ForCausalLMPolicy.module_policy = original

    return undo


PATCH = Patch(
    name="qwen2-whole-logits",
    target="colossalai.shardformer.policies.qwen2:Qwen2ForCausalLMPolicy.module_policy",
    source="d06263c30a06418266aae28f87a63703cddea52771ffd9e4b5b171505abd49ab",
    reason="colossalai/shardformer/policies/qwen2.py, Qwen2ForCausalLMPolicy.module_policy, makes "
    "the head a Linear1D_Col whatever parallel_output says: it fails for a vocabulary that does "
    "not divide, is not padded as tied embeddings are, and leaves logits divided",
    device_types=frozenset({"cpu", "cuda"}),
    plugins=frozenset({"hybrid"}),
    apply=_apply,
)
