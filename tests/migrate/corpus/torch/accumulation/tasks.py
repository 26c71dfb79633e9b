import torch
from torch import nn
from torch.utils.data import TensorDataset


class Classifier(nn.Module):
    """Computes its own loss."""

    def __init__(self):
        super().__init__()
        self.embed = nn.EmbeddingBag(23, 9)
        self.out = nn.Linear(9, 4)

    def forward(self, tokens, targets):
        return nn.functional.cross_entropy(self.out(self.embed(tokens)), targets)


def make_model():
    return Classifier()


def corpus():
    g = torch.Generator().manual_seed(8)
    tokens = torch.randint(0, 23, (80, 5), generator=g)
    return TensorDataset(tokens, tokens.sum(1) % 4)
