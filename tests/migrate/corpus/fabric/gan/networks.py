from torch import nn


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


class Generator(nn.Module):
    def __init__(self, latent: int) -> None:
        super().__init__()
        self.net = mlp(latent, 12, 12, 2)

    def forward(self, z):
        return self.net(z)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(2, 12, 12, 1)

    def forward(self, x):
        return self.net(x)
