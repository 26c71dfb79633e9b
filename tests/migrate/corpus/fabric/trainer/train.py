"""A trainer class around Fabric."""
import dataclasses
from pathlib import Path
from typing import Any, Iterable, Optional

import lightning_fabric as L
import torch
import torch.nn.functional as F
from lightning_fabric.strategies import DDPStrategy
from lightning_fabric.utilities.rank_zero import rank_zero_only
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@dataclasses.dataclass
class Settings:
    max_epochs: int = 2
    limit_batches: Optional[int] = None
    checkpoint_dir: Path = Path("checkpoints")
    grad_clip: float = 1.0


class SequenceTagger(nn.Module):
    def __init__(self, vocab: int = 20, tags: int = 4):
        super().__init__()
        self.embedding = nn.Embedding(vocab, 10)
        self.context = nn.Conv1d(10, 16, 3, padding=1)
        self.unused = nn.Linear(3, 3)  # a head of another task
        self.tags = nn.Linear(16, tags)

    def forward(self, tokens):
        return self.tags(self.context(self.embedding(tokens).transpose(1, 2)).transpose(1, 2))


@rank_zero_only
def announce(text: str) -> None:
    print(text)


class Trainer:
    def __init__(self, settings: Settings, **fabric_settings: Any) -> None:
        self.settings = settings
        ddp = DDPStrategy(find_unused_parameters=True)
        self.fabric = L.Fabric(accelerator="cpu", devices=2, strategy=ddp, precision="bf16-mixed")
        self.epoch = 0

    def fit(self, model: nn.Module, train_loader: Iterable, val_loader: Iterable) -> None:
        self.fabric.launch()
        self.train_loader = self.fabric.setup_dataloaders(train_loader)
        self.val_loader = self.fabric.setup_dataloaders(val_loader, use_distributed_sampler=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.8)
        self.model, self.optimizer = self.fabric.setup(model, optimizer)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.9)
        while self.epoch < self.settings.max_epochs:
            self.train_epoch()
            accuracy = self.validate()
            self.scheduler.step()
            self.epoch += 1
            announce(f"after {self.epoch} epochs: {accuracy:.1%}")
            self.save()

    def train_epoch(self) -> None:
        self.model.train()
        for index, (tokens, tags) in enumerate(self.train_loader):
            if self.settings.limit_batches and index >= self.settings.limit_batches:
                break
            self.optimizer.zero_grad()
            logits = self.model(tokens)
            loss = F.cross_entropy(logits.transpose(1, 2), tags)
            self.fabric.backward(loss)
            self.optimizer.step()

    @torch.no_grad()
    def validate(self) -> float:
        self.model.eval()
        right = torch.tensor(0.0, device=self.fabric.device)
        for tokens, tags in self.val_loader:
            right += (self.model(tokens).argmax(-1) == tags).float().mean()
        return self.fabric.all_reduce(right / len(self.val_loader)).item()

    def save(self) -> None:
        state = {"model": self.model, "optimizer": self.optimizer, "epoch": self.epoch}
        self.fabric.save(self.settings.checkpoint_dir / f"epoch-{self.epoch}.ckpt", state)


def make_loader(count: int, seed: int, shuffle: bool) -> DataLoader:
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 20, (count, 6), generator=g)
    tags = (tokens + tokens.roll(1, 1)) % 4
    return DataLoader(TensorDataset(tokens, tags), batch_size=8, shuffle=shuffle)


if __name__ == "__main__":
    L.seed_everything(3)
    trainer = Trainer(Settings())
    trainer.fit(SequenceTagger(), make_loader(100, 0, True), make_loader(24, 1, False))
