"""ZeRO refuses to run on a CPU, which it can."""

from __future__ import annotations

from typing import Any

from unipar_colossalai.patches.patch import Patch, Undo


def _sanity_checks(zero: Any) -> None:
    """Upstream's other check: one dtype for all parameters."""
    for group in zero.optim.param_groups:
        for parameter in group["params"]:
            assert getattr(parameter, "skip_zero_check", False) or parameter.dtype is zero._dtype


def _apply() -> Undo:
    from colossalai.zero import (  # pyright: ignore[reportMissingImports]
        LowLevelZeroOptimizer,
    )

    original = LowLevelZeroOptimizer._sanity_checks
    LowLevelZeroOptimizer._sanity_checks = _sanity_checks

    def undo() -> None:
        LowLevelZeroOptimizer._sanity_checks = original

    return undo


PATCH = Patch(
    name="zero-on-cpu",
    target="colossalai.zero:LowLevelZeroOptimizer._sanity_checks",
    source="4f098277e94d5b2db3a37cbdfccfcb4f7aa79b1d31f04d0bb0d2ce8389f6d30c",
    reason="colossalai/zero/low_level/low_level_optim.py, _sanity_checks, asserts that the "
    "accelerator is 'cuda' or 'npu'; without overlapped communication nothing else needs one",
    device_types=frozenset({"cpu"}),
    plugins=frozenset({"zero1", "zero2", "hybrid"}),
    apply=_apply,
)
