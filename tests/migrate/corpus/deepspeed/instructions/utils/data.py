import torch
from torch.utils.data import Dataset

IGNORE = -100


class PromptDataset(Dataset):
    """A prompt, and what is to follow; the loss is of the latter only."""

    def __init__(self, count, words, seed):
        generator = torch.Generator().manual_seed(seed)
        self.prompts = torch.randint(2, words, (count, 4), generator=generator)

    def __len__(self):
        return len(self.prompts)

    def __getitem__(self, i):
        prompt = self.prompts[i]
        ids = torch.cat([prompt, torch.tensor([1]), prompt.flip(0)])
        labels = ids.clone()
        labels[: len(prompt) + 1] = IGNORE
        return {"input_ids": ids, "labels": labels}
