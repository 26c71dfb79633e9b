import torch
from torch.utils.data import Dataset


class Counting(Dataset):
    """How many ones are in a string of bits?"""

    def __init__(self, n, bits):
        self.bits = (torch.rand(n, bits) < 0.5).float()

    def __getitem__(self, i):
        return self.bits[i], self.bits[i].sum(0, keepdim=True)

    def __len__(self):
        return self.bits.shape[0]
