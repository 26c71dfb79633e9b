"""A class around the engine: subclassed data, tied weights, early stopping by all ranks."""

from dataclasses import asdict, dataclass

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed import get_accelerator
from torch import nn


@dataclass
class Options:
    words: int = 17
    width: int = 16
    batch: int = 6
    lr: float = 0.03
    most: int = 20
    patience: int = 2


class Tagger(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.embed = nn.Embedding(options.words, options.width)
        self.mix = nn.GRU(options.width, options.width, batch_first=True)
        self.out = nn.Linear(options.width, options.words, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids):
        return self.out(self.mix(self.embed(ids))[0])


class Trainer:
    def __init__(self, options):
        self.options = options
        self.model = Tagger(options)
        self.engine, self.optimizer, _, self.scheduler = deepspeed.initialize(
            model=self.model, model_parameters=self.model.parameters(), config=self.config()
        )
        self.device = torch.device(get_accelerator().current_device_name())
        self.best, self.waited = float("inf"), 0

    def config(self):
        return {
            "train_micro_batch_size_per_gpu": self.options.batch,
            "optimizer": {"type": "SGD", "params": {"lr": self.options.lr, "momentum": 0.9, "nesterov": True}},
            "scheduler": {
                "type": "LRRangeTest",
                "params": {
                    "lr_range_test_min_lr": self.options.lr,
                    "lr_range_test_step_size": 3,
                    "lr_range_test_step_rate": 0.2,
                    "lr_range_test_staircase": True,
                },
            },
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 0},
        }

    def loss(self, ids, labels):
        return nn.functional.cross_entropy(self.engine(ids).flatten(0, 1), labels.flatten())

    def batch(self, seed):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, self.options.words, (self.options.batch, 7), generator=generator)
        return ids.to(self.device), ((ids * 3 + 1) % self.options.words).to(self.device)

    def evaluate(self):
        self.engine.eval()
        with torch.no_grad():
            found = self.loss(*self.batch(10_000 + dist.get_rank()))
        self.engine.train()
        dist.all_reduce(found)
        return found.item() / dist.get_world_size()

    def train(self):
        for step in range(self.options.most):
            loss = self.loss(*self.batch(2 * step + dist.get_rank()))
            self.engine.backward(loss)
            self.engine.step()
            self.engine.zero_grad()
            if step % 4 == 3:
                found = self.evaluate()
                better = found < self.best
                self.best, self.waited = min(found, self.best), 0 if better else self.waited + 1
                if better:
                    self.engine.save_checkpoint("best", client_state={"options": asdict(self.options)})
                if self.waited >= self.options.patience:
                    break
        if dist.get_rank() == 0:
            print(f"{self.best:.4f} after {self.engine.global_steps} steps, lr {self.engine.get_lr()}")


if __name__ == "__main__":
    deepspeed.init_distributed()
    torch.manual_seed(13)
    Trainer(Options()).train()
