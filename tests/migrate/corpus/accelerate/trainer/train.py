import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, random_split, TensorDataset

logger = get_logger(__name__, log_level="INFO")


@dataclass
class Config:
    epochs: int = 3
    batch_size: int = 16        # over all processes
    hidden: int = 20
    lr: float = 3e-3
    clip: float = 0.25
    out: Path = Path("out")


class AutoEncoder(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, hidden), nn.ReLU())
        self.decoder = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


class Trainer:
    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        self.accelerator = Accelerator(
            cpu=True,
            mixed_precision="bf16",
            log_with="tensorboard",
            project_dir=cfg.out,
            dataloader_config=DataLoaderConfiguration(split_batches=True),
        )
        self.model = AutoEncoder(12, cfg.hidden)
        self.optimizer = optim.Adam(self.model.parameters(), lr=cfg.lr, betas=(0.9, 0.98))
        self.scheduler = optim.lr_scheduler.StepLR(self.optimizer, step_size=5, gamma=0.8)
        self.step = 0

    def build_data(self) -> None:
        data = TensorDataset(torch.randn(90, 4) @ torch.randn(4, 12))
        train, held_out = random_split(data, [74, 16])
        self.train_loader = DataLoader(train, batch_size=self.cfg.batch_size, shuffle=True)
        self.test_loader = DataLoader(held_out, batch_size=self.cfg.batch_size)

    def fit(self) -> None:
        self.build_data()
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            self.model, self.optimizer, self.scheduler
        )
        self.train_loader, self.test_loader = self.accelerator.prepare(self.train_loader, self.test_loader)
        self.accelerator.init_trackers("autoencoder", config={"lr": self.cfg.lr})
        for epoch in range(self.cfg.epochs):
            self._epoch(epoch)
        self.accelerator.end_training()

    def _epoch(self, epoch: int) -> None:
        self.model.train()
        for (x,) in self.train_loader:
            self.optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.smooth_l1_loss(self.model(x), x)
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.cfg.clip)
            self.optimizer.step()
            self.scheduler.step()
            self.accelerator.log({"loss": loss.item()}, step=self.step)
            self.step += 1
        logger.info(f"epoch {epoch}: held out {self.test():.4f}")

    @torch.no_grad()
    def test(self) -> float:
        self.model.eval()
        errors = []
        for (x,) in self.test_loader:
            error = (self.model(x) - x).pow(2).mean(dim=1)
            errors.append(self.accelerator.gather_for_metrics(error))
        return torch.cat(errors).mean().item()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    set_seed(11)
    Trainer(Config()).fit()
