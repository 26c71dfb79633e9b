from __future__ import annotations

import argparse

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from networks import Critic, Generator


class Ring(Dataset):
    """Points on a circle."""

    def __init__(self, size: int) -> None:
        angles = torch.arange(size) * 2.399963
        self.points = torch.stack([angles.cos(), angles.sin()], dim=1)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, i: int) -> Tensor:
        return self.points[i]


def train(fabric: Fabric, epochs: int, latent: int = 3) -> None:
    fabric.seed_everything(5)
    loader = fabric.setup_dataloaders(DataLoader(Ring(64), batch_size=8, shuffle=True))
    bce = nn.BCEWithLogitsLoss()

    netG, netD = Generator(latent), Critic()
    optG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    netG, optG = fabric.setup(netG, optG)
    netD, optD = fabric.setup(netD, optD)

    for epoch in range(epochs):
        for real in loader:
            n = len(real)
            ones = torch.ones(n, 1, device=fabric.device)
            zeros = torch.zeros(n, 1, device=fabric.device)

            # (1) the critic
            noise = torch.randn(n, latent, device=fabric.device)
            fake = netG(noise)
            optD.zero_grad()
            errD = bce(netD(real), ones) + bce(netD(fake.detach()), zeros)
            fabric.backward(errD)
            optD.step()

            # (2) the generator
            optG.zero_grad()
            errG = bce(netD(fake), ones)
            fabric.backward(errG)
            optG.step()
        fabric.print(f"{epoch}: D {errD.item():.3f} G {errG.item():.3f}")

    if fabric.global_rank == 0:
        torch.save(netG.module.state_dict(), "g.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("-e", "--epochs", type=int, default=3)
    opts = parser.parse_args()
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch(train, opts.epochs)
