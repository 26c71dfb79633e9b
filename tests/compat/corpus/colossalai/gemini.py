"""A small language model with weights in bf16 chunks, built lazily."""

import colossalai
import torch
from colossalai.accelerator import get_accelerator
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin
from colossalai.cluster import DistCoordinator
from colossalai.lazy import LazyInitContext
from colossalai.nn.optimizer import HybridAdam
from torch import nn
from torch.utils.data import Dataset

VOCAB, LENGTH = 20, 12


class RandomDataset(Dataset):
    """Arithmetic sequences modulo the size of the vocabulary."""

    def __init__(self, size):
        start, step = torch.randint(0, VOCAB, (2, size, 1))
        self.input_ids = (start + step * torch.arange(LENGTH)) % VOCAB

    def __len__(self):
        return len(self.input_ids)

    def __getitem__(self, index):
        return {"input_ids": self.input_ids[index], "labels": self.input_ids[index]}


class Decoder(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.mix = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        shifted = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], 1)
        return self.head(self.norm(torch.relu(self.mix(shifted) + hidden)))


class GPTLMLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.loss_fn = nn.CrossEntropyLoss()

    def forward(self, logits, labels):
        return self.loss_fn(logits[..., :-1, :].flatten(0, 1), labels[..., 1:].flatten())


def main():
    colossalai.launch_from_torch()
    coordinator = DistCoordinator()
    plugin = GeminiPlugin(
        precision="bf16", initial_scale=2**16, max_norm=1.0, min_chunk_size_m=0.001, search_range_m=0, enable_async_reduce=False
    )
    booster = Booster(plugin=plugin)
    dataset = RandomDataset(48)
    dataloader = plugin.prepare_dataloader(dataset, batch_size=4, shuffle=True, drop_last=True, seed=42)
    with LazyInitContext(default_device=get_accelerator().get_current_device()):
        model = Decoder()
    optimizer = HybridAdam(model.parameters(), lr=5e-3)
    criterion = GPTLMLoss()
    model, optimizer, criterion, dataloader, _ = booster.boost(model, optimizer, criterion, dataloader)
    for epoch in range(2):
        dataloader.sampler.set_epoch(epoch)
        for batch in dataloader:
            batch = {k: v.to(get_accelerator().get_current_device()) for k, v in batch.items()}
            loss = criterion(model(batch["input_ids"]), batch["labels"])
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        coordinator.print_on_master(f"Loss {loss.item()}")


if __name__ == "__main__":
    main()
