import os
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


@dataclass
class Config:
    lr: float = 3e-3
    epochs: int = 3
    batch_size: int = 10
    checkpoint: str = "state.pt"


class Sequences(Dataset):
    def __init__(self, n=83):
        g = torch.Generator().manual_seed(9)
        self.x = torch.randn(n, 7, 3, generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "y": self.x[i].cumsum(0)[:, :1]}


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(3, 12, batch_first=True)
        self.out = nn.Linear(12, 1)

    def forward(self, x):
        return self.out(self.rnn(x)[0])


class Trainer:
    def __init__(self, config):
        self.config = config
        self.device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        self.model = Recurrent().to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=config.lr, total_steps=100
        )
        self.loader = DataLoader(Sequences(), batch_size=config.batch_size, shuffle=True)
        self.epoch = 0
        if os.path.exists(config.checkpoint):
            self.load()

    def compute_loss(self, batch):
        x, y = batch["x"].to(self.device), batch["y"].to(self.device)
        return nn.functional.huber_loss(self.model(x), y)

    def fit(self):
        while self.epoch < self.config.epochs:
            self.model.train()
            for batch in self.loader:
                loss = self.compute_loss(batch)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.scheduler.step()
            self.epoch += 1
            self.save()
            print(f"{self.epoch}: {loss.item():.4f}, lr {self.scheduler.get_last_lr()[0]:.2g}")

    def save(self):
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                    "scheduler": self.scheduler.state_dict(), "epoch": self.epoch},
                   self.config.checkpoint)

    def load(self):
        state = torch.load(self.config.checkpoint)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.epoch = state["epoch"]


if __name__ == "__main__":
    torch.manual_seed(4)
    Trainer(Config()).fit()
