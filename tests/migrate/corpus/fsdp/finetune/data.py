import torch
from torch.utils.data import Dataset

SENTENCES = [
    "the cat sat on the mat", "a dog lay on the rug", "the bird sang in the tree",
    "my cat likes the warm rug", "the dog ran to the tree", "a bird sat on my mat",
    "the warm sun fell on the tree", "my dog likes a cat",
] * 6


class Sentences(Dataset):
    """Sentences as word numbers; 0 pads."""

    def __init__(self):
        words = sorted({w for s in SENTENCES for w in s.split()})
        self.index = {w: i + 1 for i, w in enumerate(words)}

    def __len__(self):
        return len(SENTENCES)

    def __getitem__(self, i):
        return {"input_ids": [self.index[w] for w in SENTENCES[i].split()]}


class PaddingCollator:
    def __init__(self, pad_id=0):
        self.pad_id = pad_id

    def __call__(self, features):
        longest = max(len(f["input_ids"]) for f in features)
        ids = torch.full((len(features), longest), self.pad_id)
        for row, f in zip(ids, features):
            row[: len(f["input_ids"])] = torch.tensor(f["input_ids"])
        mask = (ids != self.pad_id).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
