"""FSDP2 with checkpoints that are resumed: run it twice, and the second run goes on."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclasses.dataclass
class Config:
    epochs: int = 3
    batch_size: int = 8
    lr: float = 5e-3
    checkpoint: Path = Path("checkpoint")
    resume: bool = False


class Waves(Dataset[tuple[Tensor, Tensor]]):
    """Sums of sines, and what comes next."""

    def __init__(self, count: int, length: int) -> None:
        generator = torch.Generator().manual_seed(11)
        start = torch.rand(count, 1, generator=generator) * 6
        self.waves = torch.sin(start + torch.arange(length + 1) / 2)

    def __len__(self) -> int:
        return len(self.waves)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.waves[index, :-1], self.waves[index, 1:]


class Forecaster(nn.Module):
    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.rnn = nn.GRU(1, hidden, batch_first=True)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh()) for _ in range(2)
        )
        self.out = nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.rnn(x.unsqueeze(-1))
        for layer in self.layers:
            h = h + layer(h)
        return self.out(h).squeeze(-1)


class AppState(Stateful):
    """What torch.distributed.checkpoint saves and loads."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int = 0) -> None:
        self.model = model
        self.optimizer = optimizer
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        return {"model": model_state, "optim": optimizer_state, "epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )
        self.epoch = state_dict["epoch"]


class Trainer:
    def __init__(self, config: Config) -> None:
        self.config = config
        use_cuda = torch.cuda.is_available()
        self.device = torch.device("cuda" if use_cuda else "cpu", self.local_rank if use_cuda else None)
        self.mesh = init_device_mesh(self.device.type, (int(os.environ["WORLD_SIZE"]),))

        data = Waves(60, 9)
        self.sampler = DistributedSampler(data, shuffle=True)
        self.loader = DataLoader(data, config.batch_size, sampler=self.sampler)

        torch.manual_seed(0)
        self.model = Forecaster().to(self.device)
        fsdp_kwargs = {"mp_policy": MixedPrecisionPolicy(param_dtype=None)}
        for layer in self.model.layers:
            fully_shard(layer, **fsdp_kwargs)
        fully_shard(self.model, **fsdp_kwargs)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=config.lr)
        self.state = AppState(self.model, self.optimizer)
        if config.resume:
            dcp.load({"app": self.state}, checkpoint_id=config.checkpoint)

    @property
    def local_rank(self) -> int:
        return int(os.environ["LOCAL_RANK"])

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = (self.model(x.to(self.device)) - y.to(self.device)).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def fit(self) -> None:
        while self.state.epoch < self.config.epochs:
            self.sampler.set_epoch(self.state.epoch)
            losses = [self.step(x, y) for x, y in self.loader]
            mean = torch.stack(losses).mean()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                print(f"{self.state.epoch}: {mean / dist.get_world_size():.5f}")
            self.state.epoch += 1
            dcp.save({"app": self.state}, checkpoint_id=self.config.checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for field in dataclasses.fields(Config):
        kind = {"action": "store_true"} if field.name == "resume" else {"type": type(field.default)}
        parser.add_argument(f"--{field.name.replace('_', '-')}", default=field.default, **kind)
    config = Config(**vars(parser.parse_args()))
    trainer = Trainer(config)
    trainer.fit()
    # The saved state is what a new trainer begins with.
    again = Trainer(dataclasses.replace(config, resume=True, epochs=config.epochs + 1))
    again.fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
