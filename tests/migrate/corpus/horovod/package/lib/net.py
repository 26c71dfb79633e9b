import torch
from torch import nn


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.b(torch.relu(self.a(x)))


def build(width):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, width), Residual(width), Residual(width), nn.Linear(width, 1))
