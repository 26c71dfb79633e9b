"""GPT-2's head leaves logits divided whatever is asked for, and the loss is taken of a part."""

from __future__ import annotations

from typing import Any

from unipar_colossalai.patches.patch import Patch, Undo


def _apply() -> Undo:
    from colossalai.shardformer.policies.gpt2 import (  # pyright: ignore[reportMissingImports]
        GPT2LMHeadModelPolicy,
    )
    from transformers import GPT2LMHeadModel

    original = GPT2LMHeadModelPolicy.module_policy

    def module_policy(self: Any) -> Any:
        policy = original(self)
        for replacement in policy[GPT2LMHeadModel].sub_module_replacement:
            if "gather_output" in replacement.kwargs:
                replacement.kwargs["gather_output"] = not self.shard_config.parallel_output
        return policy

    GPT2LMHeadModelPolicy.module_policy = module_policy

    def undo() -> None:
        GPT2LMHeadModelPolicy.module_policy = original

    return undo


PATCH = Patch(
    name="gpt2-whole-logits",
    target="colossalai.shardformer.policies.gpt2:GPT2LMHeadModelPolicy.module_policy",
    source="f9ec712c7257bb17bfddfcffd3702bafafb42d0bbc9233feb6f074e1604a9130",
    reason="colossalai/shardformer/policies/gpt2.py, GPT2LMHeadModelPolicy.module_policy, sets "
    "gather_output=False also where parallel_output is false: each rank has logits of a part of "
    "the vocabulary, and transformers' own forward takes the loss of them",
    device_types=frozenset({"cpu", "cuda"}),
    plugins=frozenset({"hybrid"}),
    apply=_apply,
)
