"""Gradient accumulation without needless all-reduces; the end of the epoch is ragged."""
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import parallel
from torch.utils import data as tud

ACCUMULATE = 4
CLIP = 0.5


def build(device):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Embedding(17, 12), nn.Flatten(), nn.Linear(60, 17))
    return parallel.DistributedDataParallel(net.to(device), gradient_as_bucket_view=True)


def run():
    local = int(os.environ.get('LOCAL_RANK', 0))
    dist.init_process_group(backend='gloo')
    device = torch.device('cuda', local) if torch.cuda.is_available() else torch.device('cpu')
    tokens = torch.randint(0, 17, (118, 6), generator=torch.Generator().manual_seed(5))
    dataset = tud.TensorDataset(tokens[:, :5], tokens[:, 5])
    sampler = tud.DistributedSampler(dataset, shuffle=True, seed=7)
    loader = tud.DataLoader(dataset, batch_size=6, sampler=sampler)
    ddp = build(device)
    opt = torch.optim.Adam([
        {'params': [p for n, p in ddp.named_parameters() if n.endswith('weight')], 'weight_decay': 0.01},
        {'params': [p for n, p in ddp.named_parameters() if n.endswith('bias')], 'weight_decay': 0.0},
    ], lr=5e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=15)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        opt.zero_grad()
        for i, (x, y) in enumerate(loader):
            last = (i + 1) % ACCUMULATE == 0 or (i + 1) == len(loader)
            with contextlib.nullcontext() if last else ddp.no_sync():
                with torch.autocast(device.type, dtype=torch.bfloat16):
                    logits = ddp(x.to(device))
                    loss = nn.functional.cross_entropy(logits, y.to(device))
                (loss / ACCUMULATE).backward()
            if (i + 1) % ACCUMULATE == 0 or (i + 1) == len(loader):
                nn.utils.clip_grad_norm_(ddp.parameters(), CLIP)
                opt.step()
                sched.step()
                opt.zero_grad()
    if dist.get_rank() == 0: print('last loss', loss.item())
    dist.destroy_process_group()


run()
