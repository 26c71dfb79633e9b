"""A few steps under a strategy beside a plain loop: ``python -m unipar.install.smoke STRATEGY``.

A small model is trained on every device under the strategy, and by a loop of plain PyTorch in one
process, on the same global batches. The losses must agree. ``unipar install`` and the self-test of
``unipar doctor`` run this in a process of its own, for frameworks change torch when they are
imported.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from unipar.errors import ConfigError
from unipar.launch.comparison import Comparison, Refusal
from unipar.strategy import Capabilities, Precision, registry
from unipar.train.fit import fit
from unipar.utils.subprocesses import end_with

_STEPS = 5
_LEARNING_RATE = 0.05
_MOMENTUM = 0.9
_TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 1e-2}
"""Largest relative difference of a loss; half precisions round at each step."""


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    end_with(os.getppid())
    try:
        found = compare(args.strategy, args.precision, args.device, args.devices, args.timeout)
    except ConfigError as error:
        found = Refusal(reason=str(error))
    if args.result is not None:
        args.result.write_text(found.model_dump_json())
    print(found)
    return int(isinstance(found, Refusal) or not found.agrees)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m unipar.install.smoke", description=__doc__)
    parser.add_argument("strategy", help="a name, or NAME:OPTION=VALUE,…")
    parser.add_argument(
        "precision", nargs="?", choices=_TOLERANCES, help="default: the first that it has"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: a CPU where it can")
    parser.add_argument("--devices", type=int, help="default: two, or fewer where it takes fewer")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds of a collective")
    parser.add_argument("--result", type=Path, help="a file to write the losses to, as JSON")
    return parser.parse_args(argv)


def compare(
    strategy: str,
    precision: Precision | None,
    device: str | None,
    devices: int | None,
    timeout: float,
) -> Comparison:
    """Train under the strategy and by the plain loop.

    Raises:
        ConfigError: the strategy does not train this model on these devices.
        WorkerError: a process failed.
    """
    able = registry.resolve(strategy).capabilities()
    device = device or ("cpu" if "cpu" in able.device_types else "cuda")
    precision = precision or next(one for one in _TOLERANCES if one in able.precisions)
    devices = _fitting(able, device, devices)
    # First: what the framework does to torch must not reach the loop that it is held against.
    expected = _plain(device, devices)
    found = _fit(strategy, precision, device, devices, timeout)
    return Comparison(
        strategy=strategy,
        device=device,
        devices=devices,
        precision=precision,
        losses=found,
        expected=expected,
        tolerance=_TOLERANCES[precision],
    )


def _fitting(able: Capabilities, device: str, devices: int | None) -> int:
    wanted = devices or 2
    if device == "cuda":
        wanted = min(wanted, torch.cuda.device_count())
    return max(1, min(wanted, able.max_devices or wanted))


def _build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def _data(devices: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Inputs, targets and the size of a global batch, of which every rank gets samples."""
    batch = 4 * devices
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(_STEPS * batch, 8, generator=generator)
    return inputs, inputs.sum(1, keepdim=True) / 4, batch


def _plain(device: str, devices: int) -> list[float]:
    """The losses of a loop by hand, in fp32, on whole global batches."""
    inputs, targets, batch = _data(devices)
    model = _build().to(device)
    # Not an optimizer such as Adam, to which a gradient of another length is the same.
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE, momentum=_MOMENTUM)
    losses = []
    for part, wanted in zip(inputs.split(batch), targets.split(batch), strict=True):
        loss = nn.functional.mse_loss(model(part.to(device)), wanted.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _fit(
    strategy: str, precision: Precision, device: str, devices: int, timeout: float
) -> list[float]:
    inputs, targets, batch = _data(devices)
    with tempfile.TemporaryDirectory() as output_dir:
        result = fit(
            _build,
            (inputs, targets),
            strategy=strategy,
            loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
            optimizer={"name": "sgd", "lr": _LEARNING_RATE, "momentum": _MOMENTUM},
            precision=precision,
            device=device,  # pyright: ignore[reportArgumentType]
            devices=devices,
            global_batch_size=batch,
            steps=_STEPS,
            shuffle=False,
            checkpoint=False,
            output_dir=output_dir,
            progress=False,
            timeout=timeout,
            self_test=False,
        )
    return result.losses


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
