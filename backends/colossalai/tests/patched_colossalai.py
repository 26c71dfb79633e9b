"""``python patched_colossalai.py PLUGIN SCRIPT [ARGUMENT...]``: a script for Colossal-AI, on a CPU.

The published Colossal-AI does not run there with most plugins. This applies the changes in memory
that unipar's backend makes, says so, and runs the script as it is.
"""

from __future__ import annotations

import runpy
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

PLUGINS = {
    "accumulation": "zero1", "adversarial": "ddp", "bert": "zero1", "checkpointing": "zero2",
    "distillation": "ddp", "gemini": "gemini", "llama": "hybrid", "resnet": "ddp",
    "sharded": "fsdp",
}  # fmt: skip
"""The plugin that a script of tests/compat takes, by which Colossal-AI is changed to run here."""

OTHERS = {
    "migrate/accumulation": "ddp", "migrate/flat": "ddp", "migrate/gpt": "zero1",
    "migrate/llama": "hybrid",
    "migrate/trainer": "zero2", "migrate/vit": "ddp", "migrate/zero": "zero1",
}  # fmt: skip
"""Likewise of those of tests/migrate."""


class _Kernels:
    """Colossal-AI's own formula of Adam, which it keeps for bf16, in the place of its kernel.

    The kernel is compiled against CUDA.
    """

    def load(self) -> _Kernels:
        return self

    def CPUAdamOptimizer(self, *settings: Any) -> _Kernels:
        self._decouples = settings[-1]
        return self

    def step(self, step: int, lr: float, beta1: float, beta2: float, *rest: Any) -> None:
        from colossalai.nn.optimizer.cpu_adam import CPUAdam  # pyright: ignore

        eps, decay, _, data, grad, first, second, scale = rest
        assert scale <= 0, "gradients are unscaled before the step"
        CPUAdam.torch_adam_update(
            None, data, grad, first, second, lr, beta1, beta2, eps, decay,
            1 - beta1**step, 1 - beta2**step, self._decouples,
        )  # fmt: skip


def main(plugin: str, script: str) -> None:
    from unipar_colossalai import patches
    from unipar_colossalai.framework import load

    load()
    made = [one.name for one in patches.ALL if one.needed("cpu", plugin)]
    patches.apply("cpu", plugin)
    from unipar_colossalai.cpu import Host

    api: Any = import_module("colossalai.accelerator.api")
    Host.synchronize = lambda *_: None  # Timers and loads of optimizers wait for a GPU.
    api.set_accelerator(Host())
    optimizers: Any = import_module("colossalai.nn.optimizer.cpu_adam")
    optimizers.CPUAdamLoader = _Kernels
    print(f"Colossal-AI is changed for {script}: {', '.join(made)}, host accelerator", flush=True)
    sys.argv = [script, *sys.argv[3:]]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
