import torch
from torch.utils.data import Dataset


class RandomTokens(Dataset):
    def __init__(self, count, length, vocab):
        generator = torch.Generator().manual_seed(3)
        starts = torch.randint(0, vocab, (count, 1), generator=generator)
        self.ids = (starts + torch.arange(length) * 5) % vocab

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "attention_mask": torch.ones_like(self.ids[i])}
