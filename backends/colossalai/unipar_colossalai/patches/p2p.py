"""Without NCCL, a pipeline's stages ask torch for a backend that only Huawei's fork of it has."""

from __future__ import annotations

from typing import Any

from unipar_colossalai.patches.patch import Patch, Undo


def _never(group: Any) -> bool:
    return False


def _apply() -> Undo:
    import colossalai.pipeline.p2p as p2p  # pyright: ignore[reportMissingImports]

    original = p2p._check_for_nccl_hccl_backend
    p2p._check_for_nccl_hccl_backend = _never

    def undo() -> None:
        p2p._check_for_nccl_hccl_backend = original

    return undo


PATCH = Patch(
    name="stages-on-cpu",
    target="colossalai.pipeline.p2p:_check_for_nccl_hccl_backend",
    source="595088b2b5b0a2da06232b28b3653eb252c5a71b7e11a17fecd2e14fde81ad07",
    reason="colossalai/pipeline/p2p.py, _check_for_nccl_hccl_backend, calls "
    "torch.distributed.is_hccl_available where there is no NCCL, and PyTorch has no such function",
    device_types=frozenset({"cpu"}),
    plugins=frozenset({"hybrid"}),
    apply=_apply,
)
