"""Train a small character transformer with FSDP.

    torchrun --nproc_per_node 2 train.py --epochs 2
"""
import argparse
import functools
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel as FSDP,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x, mask):
        h = self.norm1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class CharTransformer(nn.Module):
    def __init__(self, vocab, dim=16, heads=2, layers=2, length=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.position = nn.Parameter(torch.zeros(length, dim))
        self.blocks = nn.ModuleList([Block(dim, heads) for _ in range(layers)])
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens):
        n = tokens.shape[1]
        mask = torch.triu(torch.full((n, n), float("-inf"), device=tokens.device), diagonal=1)
        x = self.embed(tokens) + self.position[:n]
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


class Windows(Dataset):
    def __init__(self, text, length):
        self.vocab = sorted(set(text))
        self.ids = torch.tensor([self.vocab.index(c) for c in text])
        self.length = length

    def __len__(self):
        return (len(self.ids) - 1) // self.length

    def __getitem__(self, i):
        window = self.ids[i * self.length : (i + 1) * self.length + 1]
        return window[:-1], window[1:]


def train(args, model, rank, device, loader, optimizer, epoch, sampler):
    model.train()
    ddp_loss = torch.zeros(2).to(device)
    sampler.set_epoch(epoch)
    for tokens, targets in loader:
        tokens, targets = tokens.to(device), targets.to(device)
        optimizer.zero_grad()
        output = model(tokens)
        loss = F.cross_entropy(output.flatten(0, 1), targets.flatten())
        loss.backward()
        model.clip_grad_norm_(0.5)
        optimizer.step()
        ddp_loss[0] += loss.item()
        ddp_loss[1] += 1
    dist.all_reduce(ddp_loss, op=dist.ReduceOp.SUM)
    if rank == 0:
        print(f"Train Epoch: {epoch} \tLoss: {ddp_loss[0] / ddp_loss[1]:.6f}")


def save(model, optimizer, epoch, path):
    gpu = torch.cuda.is_available()
    with FSDP.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=gpu, rank0_only=True),
        FullOptimStateDictConfig(offload_to_cpu=gpu, rank0_only=True),
    ):
        weights = model.state_dict()  # only rank 0 has any
        optim = FSDP.optim_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        torch.save({"model": weights, "optimizer": optim, "epoch": epoch}, path)
    dist.barrier()


def main(args):
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")

    torch.manual_seed(args.seed)
    text = "the quick brown fox jumps over the lazy dog. pack my box with five dozen jugs. " * 9
    data = Windows(text, 12)
    sampler = DistributedSampler(data, rank=rank, num_replicas=world_size, shuffle=True)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)

    block_policy = functools.partial(
        transformer_auto_wrap_policy,
        transformer_layer_cls={Block},
    )
    model = CharTransformer(len(data.vocab)).to(device)
    model = FSDP(
        model,
        auto_wrap_policy=block_policy,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        device_id=device,
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        train(args, model, rank, device, loader, optimizer, epoch, sampler)
        scheduler.step()
        if args.save_model:
            save(model, optimizer, epoch, "char.pt")

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="FSDP character transformer")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save-model", action=argparse.BooleanOptionalAction, default=True)
    main(parser.parse_args())
