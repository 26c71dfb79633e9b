"""GPT-2 drops other activations on each rank of tensor parallelism, where all have the same."""

from __future__ import annotations

from typing import Any

from unipar_colossalai.patches.patch import Patch, Undo


def _apply() -> Undo:
    from colossalai.shardformer.layer import (  # pyright: ignore[reportMissingImports]
        DropoutForParallelInput,
    )
    from colossalai.shardformer.policies.gpt2 import (  # pyright: ignore[reportMissingImports]
        GPT2Policy,
    )

    original = GPT2Policy.module_policy

    def module_policy(self: Any) -> Any:
        policy = original(self)
        for described in policy.values():
            if described.sub_module_replacement is not None:
                described.sub_module_replacement = [
                    replacement
                    for replacement in described.sub_module_replacement
                    if replacement.target_module is not DropoutForParallelInput
                ]
        return policy

    GPT2Policy.module_policy = module_policy

    def undo() -> None:
        GPT2Policy.module_policy = original

    return undo


PATCH = Patch(
    name="gpt2-dropout",
    target="colossalai.shardformer.policies.gpt2:GPT2Policy.module_policy",
    source="2b5c0c26a3085f0da4b86fbf4258b2181369dde4c49563beeec83cff74a8a210",
    reason="colossalai/shardformer/policies/gpt2.py, GPT2Policy.module_policy, makes every dropout "
    "one that draws by rank (DropoutForParallelInput), also those of activations that each rank "
    "has whole: ranks would go on with different ones, each a model of its own",
    device_types=frozenset({"cpu", "cuda"}),
    plugins=frozenset({"hybrid"}),
    apply=_apply,
)
