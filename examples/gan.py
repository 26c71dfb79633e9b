"""A small GAN on digits: two engines in one session, each with its own optimizer.

python examples/gan.py --strategy ddp --devices 2
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import unipar
from examples.digits import digits

NOISE = 16
SHADES = " .:+#@"


def adam(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for _, p in named], lr=1e-3, betas=(0.5, 0.999))


def generator() -> nn.Module:
    return nn.Sequential(
        nn.Linear(NOISE, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.Unflatten(1, (1, 8, 8)),
        nn.Sigmoid(),
    )


def discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 1)
    )


def train(placement: unipar.Placement, strategy: str, epochs: int) -> None:
    """What each process runs; ``placement`` says which one it is."""
    (images, _), _ = digits()
    with unipar.Session(strategy=strategy, placement=placement) as session:
        forger = session.prepare(generator, optimizer=adam, name="generator")
        judge = session.prepare(discriminator, optimizer=adam, name="discriminator")
        batches = session.loader(images, global_batch_size=64)
        device = session.world.device
        for epoch in range(1, epochs + 1):
            losses = []
            for batch in batches:
                (part,) = batch.microbatches
                count = part.num_samples
                real = part.data.to(device)
                forged = forger(torch.randn(len(real), NOISE, device=device))

                on_real, on_forged = judge(torch.cat([real, forged.detach()])).chunk(2)
                mistakes = functional.softplus(-on_real) + functional.softplus(on_forged)
                judge.backward(mistakes.mean() / 2, num_items=count)
                judged = judge.step().loss

                forger.backward(functional.softplus(-judge(forged)).mean(), num_items=count)
                losses.append((judged, forger.step().loss))
            if session.world.is_main and epoch % max(1, epochs // 5) == 0:
                judged, fooled = (sum(part) / len(part) for part in zip(*losses, strict=True))
                print(f"epoch {epoch}: discriminator {judged:.3f}, generator {fooled:.3f}")
        with torch.no_grad():
            samples = forger(torch.randn(8, NOISE, device=device)).cpu()
        if session.world.is_main:
            print("forged digits:", *drawn(samples), sep="\n")


def drawn(images: torch.Tensor) -> list[str]:
    """Images of shape (n, 1, 8, 8) in [0, 1], side by side in characters."""
    rows = (images.squeeze(1) * (len(SHADES) - 1)).round().long().transpose(0, 1)
    return [
        "  ".join("".join(SHADES[v] * 2 for v in line) for line in row) for row in rows.tolist()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=100)
    args = parser.parse_args()
    unipar.spawn(
        functools.partial(train, strategy=args.strategy, epochs=args.epochs), devices=args.devices
    )


if __name__ == "__main__":
    main()
