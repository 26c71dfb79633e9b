"""A decoder trained by --deepspeed_config, with activations computed again and two groups."""

import argparse
import json
import math
import os

import deepspeed
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

HERE = os.path.dirname(os.path.abspath(__file__))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.heads = heads

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln2(x))


class Decoder(nn.Module):
    def __init__(self, words=29, width=32, layers=2, length=12, checkpointed=True):
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.checkpointed = checkpointed

    def forward(self, ids, labels):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            if self.checkpointed and self.training:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Counting(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        row = torch.tensor([(i + j * (1 + i % 4)) % 29 for j in range(13)])
        return {"ids": row[:-1], "labels": row[1:]}


def groups(model, decay):
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for n, p in named if p.ndim > 1], "weight_decay": decay},
        {"params": [p for n, p in named if p.ndim <= 1], "weight_decay": 0.0},
    ]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=5)
    parser = deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=os.path.join(HERE, "language.json"))
    args = parser.parse_args()
    with open(args.deepspeed_config) as file:
        decay = json.load(file)["optimizer"]["params"]["weight_decay"]

    deepspeed.init_distributed()
    torch.manual_seed(args.seed)
    with deepspeed.zero.Init(enabled=False):
        model = Decoder()
    engine, _, _, scheduler = deepspeed.initialize(args=args, model=model, model_parameters=groups(model, decay))
    assert engine.gradient_accumulation_steps() == 4
    data, test = Counting(112), Counting(20)
    sampler = DistributedSampler(data, shuffle=True, seed=args.seed)
    loader = DataLoader(data, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        engine.train()
        for batch in loader:
            batch = {name: one.to(engine.device) for name, one in batch.items()}
            loss = engine(batch["ids"], labels=batch["labels"])
            engine.backward(loss)
            engine.step()
        engine.eval()
        total = torch.zeros(2, device=engine.device)
        with torch.no_grad():
            for batch in DataLoader(test, batch_size=4, sampler=DistributedSampler(test, shuffle=False)):
                batch = {name: one.to(engine.device) for name, one in batch.items()}
                total += torch.tensor([engine(**batch).item(), 1.0], device=engine.device)
        deepspeed.comm.all_reduce(total)
        norm = engine.get_global_grad_norm()
        if deepspeed.comm.get_rank() == 0:
            print(f"epoch {epoch}: perplexity {math.exp(total[0] / total[1]):.3f}, lr {scheduler.get_last_lr()}, norm {norm:.3f}")
    engine.save_16bit_model("out", "model.bin")
    if engine.global_rank == 0:
        stored = torch.load(os.path.join("out", "model.bin"), weights_only=True)
        print(sorted(stored)[:3], sum(one.numel() for one in stored.values()))


if __name__ == "__main__":
    main()
