"""A small GAN on digits: two engines in one session, each with its own optimizer.

python examples/gan.py --strategy ddp --devices 2
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import unipar
from examples.digits import digits

NOISE = 16


def adam(named):
    return torch.optim.Adam([p for _, p in named], lr=1e-3, betas=(0.5, 0.999))


def train(placement: unipar.Placement | None, strategy: str, epochs: int) -> None:
    (images, _), _ = digits()
    torch.manual_seed(0)
    generator = nn.Sequential(
        nn.Linear(NOISE, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid(), nn.Unflatten(1, (1, 8, 8))
    )
    discriminator = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.LeakyReLU(), nn.Linear(64, 1))
    with unipar.Session(strategy=strategy, placement=placement) as session:
        forger = session.prepare(generator, optimizer=adam, name="generator")
        judge = session.prepare(discriminator, optimizer=adam, name="discriminator")
        batches = session.loader(images, global_batch_size=64)
        for epoch in range(epochs):
            judged_losses, forged_losses = [], []
            for batch in batches:
                (part,) = batch.microbatches
                real = part.data.to(session.world.device)
                count = part.num_samples
                fake = forger(torch.randn(len(real), NOISE, device=real.device))
                verdicts = judge(torch.cat([real, fake.detach()]))
                truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
                judged = functional.binary_cross_entropy_with_logits(
                    verdicts, truth.to(real.device)
                )
                judge.backward(judged, num_items=count)
                judged_losses.append(judge.step().loss)

                fooled = functional.softplus(-judge(fake)).mean()
                forger.backward(fooled, num_items=count)
                forged_losses.append(forger.step().loss)
            if session.world.is_main:
                print(
                    f"epoch {epoch + 1}: discriminator {judged_losses[-1]:.3f}, "
                    f"generator {forged_losses[-1]:.3f}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    unipar.spawn(
        functools.partial(train, strategy=args.strategy, epochs=args.epochs), devices=args.devices
    )


if __name__ == "__main__":
    main()
