#!/usr/bin/env python3
# FSDP2: gradient accumulation, bf16 autocast, a schedule with warmup
import os
import torch, torch.distributed as dist, torch.nn as nn
from torch.distributed.fsdp import fully_shard, FSDPModule
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler

STEPS_PER_UPDATE = 3
WARMUP = 2


class ResBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2*width), nn.Linear(2*width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class ResMLP(nn.Module):
    def __init__(self, width=12, depth=3, classes=4):
        super().__init__()
        self.stem = nn.Linear(6, width)
        self.blocks = nn.Sequential(*(ResBlock(width) for _ in range(depth)))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)))


def shard(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, ResBlock):
            fully_shard(module)
    fully_shard(model)
    assert isinstance(model, FSDPModule)
    return model


def main():
    dist.init_process_group(backend='cpu:gloo,cuda:nccl' if torch.cuda.is_available() else 'gloo')
    local_rank = int(os.environ.get('LOCAL_RANK', 0))
    dev = torch.device('cuda', local_rank) if torch.cuda.is_available() else torch.device('cpu')

    torch.manual_seed(7)                      # the same weights everywhere
    x = torch.randn(110, 6)
    y = (x[:, :4] + 0.3 * x[:, 2:]).argmax(-1)
    ds = TensorDataset(x, y)
    sampler = DistributedSampler(ds, seed=3)
    dl = DataLoader(ds, batch_size=8, sampler=sampler)   # 7 batches: two full updates and a rest

    model = shard(ResMLP().to(dev))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: min(1.0, (i + 1) / WARMUP))

    for epoch in range(2):
        sampler.set_epoch(epoch)
        for i, (xb, yb) in enumerate(dl):
            is_update = (i + 1) % STEPS_PER_UPDATE == 0 or i + 1 == len(dl)
            model.set_requires_gradient_sync(is_update)   # reduce on the last one only
            with torch.autocast(dev.type, dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(xb.to(dev)), yb.to(dev))
            (loss / STEPS_PER_UPDATE).backward()
            if is_update:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
                opt.step(); sched.step(); opt.zero_grad()
        if dist.get_rank() == 0:
            print(f'{epoch=} {loss.item()=:.4f} lr={sched.get_last_lr()[0]:.3g}')
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
