"""The FSDP plugin asks CUDA for the device, and on a CPU there is none."""

from __future__ import annotations

from unipar_colossalai.patches.host import HostTorch
from unipar_colossalai.patches.patch import Patch, Undo


def _apply() -> Undo:
    import colossalai.booster.plugin.torch_fsdp_plugin as plugin  # pyright: ignore
    import torch

    original = plugin.torch
    plugin.torch = HostTorch(current_device=lambda: torch.device("cpu"))

    def undo() -> None:
        plugin.torch = original

    return undo


PATCH = Patch(
    name="fsdp-on-cpu",
    target="colossalai.booster.plugin:TorchFSDPPlugin.configure",
    source="1be71c3e7a99497f3c219c6bebc3577f53e7c5361269962ab0f27237f01648cd",
    reason="colossalai/booster/plugin/torch_fsdp_plugin.py, configure, calls "
    "torch.cuda.current_device()",
    device_types=frozenset({"cpu"}),
    plugins=frozenset({"fsdp"}),
    apply=_apply,
)
