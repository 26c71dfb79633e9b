"""A trainer of a class of its own, with callbacks, groups of parameters and an endless sampler."""

import time
from collections import defaultdict

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torch.utils.data.dataloader import DataLoader


class CfgNode:
    def __init__(self, **kwargs):
        self.__dict__.update(kwargs)


class GPT(nn.Module):
    def __init__(self, vocab, width):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.h = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(2)
        )
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def configure_optimizers(self, train_config):
        decay, no_decay = set(), set()
        for mn, m in self.named_modules():
            for pn, _ in m.named_parameters(recurse=False):
                fpn = f"{mn}.{pn}" if mn else pn
                matrix = pn == "weight" and isinstance(m, nn.Linear)
                (decay if matrix else no_decay).add(fpn)
        param_dict = dict(self.named_parameters())
        optim_groups = [
            {"params": [param_dict[pn] for pn in sorted(decay)], "weight_decay": 0.1},
            {"params": [param_dict[pn] for pn in sorted(no_decay)], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(optim_groups, lr=train_config.learning_rate, betas=(0.9, 0.95))

    def forward(self, idx, targets=None):
        x = self.wte(idx)
        for block in self.h:
            x = x + block(x)
        logits = self.lm_head(x)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


class SortDataset(Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, idx):
        rows = torch.randint(5, (6,), generator=torch.Generator().manual_seed(idx))
        return rows, rows.sort().values


class Trainer:
    def __init__(self, config, model, train_dataset):
        self.config, self.model, self.train_dataset = config, model, train_dataset
        self.optimizer = None
        self.callbacks = defaultdict(list)
        if config.device == "auto":
            self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = self.model.to(self.device)
        self.iter_num = 0

    def add_callback(self, onevent, callback):
        self.callbacks[onevent].append(callback)

    def run(self):
        model, config = self.model, self.config
        self.optimizer = model.configure_optimizers(config)
        train_loader = DataLoader(
            self.train_dataset,
            sampler=torch.utils.data.RandomSampler(
                self.train_dataset, replacement=True, num_samples=int(1e10)
            ),
            shuffle=False, batch_size=config.batch_size, num_workers=config.num_workers,
        )
        model.train()
        data_iter = iter(train_loader)
        while True:
            try:
                batch = next(data_iter)
            except StopIteration:
                data_iter = iter(train_loader)
                batch = next(data_iter)
            x, y = [t.to(self.device) for t in batch]
            logits, self.loss = model(x, y)
            model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_norm_clip)
            self.optimizer.step()
            for callback in self.callbacks["on_batch_end"]:
                callback(self)
            self.iter_num += 1
            self.iter_time = time.time()
            if self.iter_num >= config.max_iters:
                break


torch.manual_seed(3407)
config = CfgNode(device="auto", num_workers=0, max_iters=20, batch_size=8, learning_rate=5e-3,
                 grad_norm_clip=1.0)
trainer = Trainer(config, GPT(5, 12), SortDataset())
trainer.add_callback(
    "on_batch_end", lambda t: print(t.iter_num, t.loss.item()) if t.iter_num % 5 == 0 else None
)
trainer.run()
