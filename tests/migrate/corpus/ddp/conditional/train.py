"""Runs on one process as it is, and on several under torchrun."""
import argparse
import os

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def get_args():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('--epochs', default=3, type=int)
    p.add_argument('--batch-size', default=12, type=int, help='per process')
    p.add_argument('--lr', default=0.1, type=float)
    p.add_argument('--amp', action='store_true')
    p.add_argument('--out', default='')
    return p.parse_args()


def init_distributed(args):
    args.world_size = int(os.environ.get('WORLD_SIZE', 1))
    args.rank = int(os.environ.get('RANK', 0))
    args.distributed = args.world_size > 1
    if args.distributed:
        args.gpu = int(os.environ['LOCAL_RANK'])
        torch.distributed.init_process_group(backend='nccl' if torch.cuda.is_available() else 'gloo')
        torch.distributed.barrier()


def build_model():
    return nn.Sequential(
        nn.Conv1d(2, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(),
        nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(32, 4),
    )


def train_one_epoch(args, model, criterion, optimizer, loader, device):
    model.train()
    for signal, label in loader:
        signal, label = signal.to(device, non_blocking=True), label.to(device, non_blocking=True)
        with torch.amp.autocast('cpu', dtype=torch.bfloat16, enabled=args.amp):
            loss = criterion(model(signal), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main(args):
    init_distributed(args)
    device = torch.device('cpu')
    torch.manual_seed(1234)
    data = TensorDataset(torch.randn(100, 2, 16), torch.randint(0, 4, (100,)))
    if args.distributed:
        sampler = DistributedSampler(data, shuffle=True)
    else:
        sampler = RandomSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)

    model = build_model().to(device)
    model_without_ddp = model
    if args.distributed:
        model = DistributedDataParallel(model, find_unused_parameters=False)
        model_without_ddp = model.module
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    lr_scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 2])

    for epoch in range(args.epochs):
        if args.distributed:
            sampler.set_epoch(epoch)
        last = train_one_epoch(args, model, criterion, optimizer, loader, device)
        lr_scheduler.step()
        if args.rank == 0:
            print(f'epoch {epoch}: {last:.3f}')
            if args.out:
                torch.save({'model': model_without_ddp.state_dict(), 'epoch': epoch}, args.out)


if __name__ == '__main__':
    main(get_args())
