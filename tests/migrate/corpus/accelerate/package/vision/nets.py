import torch
from torch import nn


class Generator(nn.Module):
    def __init__(self, latent, size):
        super().__init__()
        self.latent = latent
        self.layers = nn.Sequential(nn.Linear(latent, 16), nn.LeakyReLU(0.2), nn.Linear(16, size), nn.Tanh())

    def forward(self, z):
        return self.layers(z)


def make_critic(size):
    return nn.Sequential(nn.Linear(size, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))


def stripes(n, size):
    """Rows of alternating sign, the phase at random."""
    phase = torch.randint(0, 2, (n, 1)) * 2 - 1
    return phase * torch.tensor([1.0, -1.0]).repeat(size // 2) * 0.8
