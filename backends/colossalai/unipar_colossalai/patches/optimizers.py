"""Gemini takes its own three optimizers only, though what it gives them is what any can update."""

from __future__ import annotations

from unipar_colossalai.patches.patch import Patch, Undo


class _Any:
    def __contains__(self, kind: object) -> bool:
        return True


def _apply() -> Undo:
    from colossalai.zero.gemini import gemini_optimizer  # pyright: ignore[reportMissingImports]

    original = gemini_optimizer._AVAIL_OPTIM_LIST
    gemini_optimizer._AVAIL_OPTIM_LIST = _Any()

    def undo() -> None:
        gemini_optimizer._AVAIL_OPTIM_LIST = original

    return undo


PATCH = Patch(
    name="gemini-optimizers",
    target="colossalai.zero.gemini.gemini_optimizer:GeminiOptimizer.__init__",
    source="f199c4d185049c8d3b7923e02ee64c81283836bdd77bac0988982a74f3c8aa87",
    reason="colossalai/zero/gemini/gemini_optimizer.py, GeminiOptimizer, asserts one of FusedAdam, "
    "CPUAdam and HybridAdam, whose step clips and unscales; here gradients are fp32, clipped and "
    "unscaled before the step, and the user's own optimizer takes it",
    device_types=frozenset({"cpu", "cuda"}),
    plugins=frozenset({"gemini"}),
    apply=_apply,
)
