"""Ranks of tensor parallelism drop other activations, also where each has all of them."""

from __future__ import annotations

from typing import Any

from unipar_colossalai.patches.patch import Patch, Undo


def _as_it_is(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module


def _apply() -> Undo:
    from colossalai.shardformer.layer import (  # pyright: ignore[reportMissingImports]
        DropoutForParallelInput,
    )

    original = DropoutForParallelInput.from_native_module
    DropoutForParallelInput.from_native_module = staticmethod(_as_it_is)

    def undo() -> None:
        DropoutForParallelInput.from_native_module = staticmethod(original)

    return undo


PATCH = Patch(
    name="same-dropout",
    target="colossalai.shardformer.layer.dropout:DropoutForParallelInput.from_native_module",
    source="648bb29694b91026aca47a847003932f9f36e0a601adbf32fbd1cbae0f53f640",
    reason="colossalai/shardformer/policies/gpt2.py and gptj.py make every dropout one that draws "
    "by rank (DropoutForParallelInput), also those of activations that each rank has whole: ranks "
    "would go on with different ones, each a model of its own",
    device_types=frozenset({"cpu", "cuda"}),
    plugins=frozenset({"hybrid"}),
    apply=_apply,
)
