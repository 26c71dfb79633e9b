"""A small language model: accumulation, clipping, a schedule by hand, and going on from a file."""

import math
import os
import time

import torch
from lightning_fabric import Fabric
from lightning_fabric.loggers import CSVLogger
from lightning_fabric.strategies import FSDPStrategy
from lightning_fabric.utilities import measure_flops
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

ACCUMULATE, STEPS, VOCABULARY, CONTEXT = 3, 9, 23, 12
sharded = os.environ.get("SHARDED") == "1"


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, x, mask):
        y = self.norm(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = torch.full((length, length), -math.inf, device=tokens.device).triu(1)
        x = self.embedding(tokens) + self.places(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


class Text(Dataset):
    def __init__(self):
        self.tokens = torch.arange(900).pow(2) % VOCABULARY

    def __len__(self):
        return len(self.tokens) // CONTEXT - 1

    def __getitem__(self, index):
        part = self.tokens[index * CONTEXT : (index + 1) * CONTEXT + 1]
        return part[:-1], part[1:]


def rate(step):
    return 1e-2 * min(1.0, (step + 1) / 4) * 0.5 * (1 + math.cos(math.pi * step / STEPS))


def train(fabric, state, loader):
    model, optimizer = state["model"], state["optimizer"]
    batches, begun = iter(loader), time.perf_counter()
    while state["step"] < STEPS:
        for group in optimizer.param_groups:
            group["lr"] = rate(state["step"])
        for micro in range(ACCUMULATE):
            tokens, targets = next(batches, (None, None))
            if tokens is None:
                batches = iter(loader)
                tokens, targets = next(batches)
            with fabric.no_backward_sync(model, enabled=micro + 1 < ACCUMULATE):
                logits = model(tokens)
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
                fabric.backward(loss / ACCUMULATE)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        state["step"] += 1
        mean = fabric.all_reduce(loss.detach().clone(), reduce_op="mean")
        fabric.log_dict({"loss": mean, "lr": optimizer.param_groups[0]["lr"]}, step=state["step"])
        if state["step"] == 4:
            fabric.save("halfway.ckpt", state)
    fabric.print(f"{time.perf_counter() - begun:.1f} s")


def main():
    strategy = FSDPStrategy(auto_wrap_policy={Block}, activation_checkpointing=Block) if sharded else "ddp"
    logger = CSVLogger("logs", name="language", flush_logs_every_n_steps=1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, precision="32-true", loggers=logger)
    fabric.launch()
    fabric.seed_everything(17)
    loader = fabric.setup_dataloaders(DataLoader(Text(), batch_size=4, shuffle=True, drop_last=True))
    with torch.device("meta"):
        meta = Model()
        x = torch.zeros(4, CONTEXT, dtype=torch.int64)
        flops = measure_flops(meta, lambda: meta(x))
    fabric.print(f"{flops} operations in a micro-batch")
    with fabric.init_module(empty_init=False):
        model = Model()
    model = fabric.setup(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer = fabric.setup_optimizers(optimizer)
    state = {"model": model, "optimizer": optimizer, "step": 0, "hparams": {"width": 16}}
    train(fabric, state, loader)
    fabric.load("halfway.ckpt", state)
    assert state["step"] == 4
    train(fabric, state, loader)


main()
