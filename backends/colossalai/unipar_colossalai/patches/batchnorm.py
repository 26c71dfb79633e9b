"""The DDP plugin makes every BatchNorm a SyncBatchNorm, unasked."""

from __future__ import annotations

from typing import Any

from unipar_colossalai.patches.patch import Patch, Undo


def _apply() -> Undo:
    import colossalai.booster.plugin.torch_ddp_plugin as plugin  # pyright: ignore
    from torch import nn

    original = plugin.nn
    plugin.nn = _Kept(nn)

    def undo() -> None:
        plugin.nn = original

    return undo


class _Kept:
    """``torch.nn``, as that one module of Colossal-AI sees it."""

    def __init__(self, nn: Any) -> None:
        self._nn = nn
        self.SyncBatchNorm = self

    def convert_sync_batchnorm(self, module: Any, process_group: Any = None) -> Any:
        return module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._nn, name)


PATCH = Patch(
    name="keep-batchnorm",
    target="colossalai.booster.plugin:TorchDDPPlugin.configure",
    source="d9b5ed460a47a08a453cf9ee829b1af49274d134f4f961bcb6a7fb2b61b80813",
    reason="colossalai/booster/plugin/torch_ddp_plugin.py, configure, converts BatchNorm: other "
    "statistics than the user's model has, and an error on a CPU",
    device_types=frozenset({"cpu", "cuda"}),
    plugins=frozenset({"ddp"}),
    apply=_apply,
)
