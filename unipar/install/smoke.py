"""Whether a framework just installed really trains: ``python -m unipar.install.smoke STRATEGY``.

A small model is trained for a few steps on two processes under the strategy, and on one process
under plain PyTorch, on the same global batches. The losses must agree.
"""

from __future__ import annotations

import math
import sys
import tempfile

import torch
from torch import nn

from unipar.strategy import registry
from unipar.train.fit import fit

_STEPS = 5
_TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 1e-2}
"""Largest relative difference of a loss; half precisions round at each step."""


def main(strategy: str, precision: str) -> int:
    device = "cpu" if "cpu" in registry.resolve(strategy).capabilities().device_types else "cuda"
    devices = 2 if device == "cpu" else min(2, torch.cuda.device_count())
    expected = _losses("single", "fp32", 1, device)
    found = _losses(strategy, precision, devices, device)
    tolerance = _TOLERANCES[precision]
    for step, (one, other) in enumerate(zip(found, expected, strict=True), 1):
        if not math.isclose(one, other, rel_tol=tolerance):
            print(
                f"step {step} under '{strategy}' on {devices} processes has loss {one!r}; plain "
                f"PyTorch has {other!r}, and {tolerance:g} is the most they may differ, relatively."
            )
            return 1
    print(f"{_STEPS} steps under '{strategy}' on {devices} {device} processes agree with PyTorch.")
    return 0


def _losses(strategy: str, precision: str, devices: int, device: str) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(32, 8, generator=generator)
    targets = inputs.sum(1, keepdim=True)
    with tempfile.TemporaryDirectory() as output_dir:
        result = fit(
            lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)),
            (inputs, targets),
            strategy=strategy,
            loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
            optimizer={"name": "AdamW", "lr": 1e-2},
            precision=precision,  # pyright: ignore[reportArgumentType]
            devices=devices,
            device=device,  # pyright: ignore[reportArgumentType]
            global_batch_size=8,
            steps=_STEPS,
            checkpoint=False,
            output_dir=output_dir,
            progress=False,
            timeout=60,
        )
    return result.losses


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
