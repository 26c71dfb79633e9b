#!/usr/bin/env python
# Classification with functions, argparse, and metrics summed over ranks.
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, hidden), nn.BatchNorm1d(hidden), nn.ReLU())
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(hidden, 3)

    def forward(self, x):
        return F.log_softmax(self.head(self.drop(self.body(x))), dim=1)


def setup():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def is_main():
    return dist.get_rank() == 0


def train(args, model, device, loader, optimizer, epoch):
    model.train()
    for i, (data, target) in enumerate(loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad(set_to_none=True)
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if i % args.log_interval == 0 and is_main():
            print(f'epoch {epoch} step {i}: loss {loss.item():.4f}')  # of rank 0


@torch.no_grad()
def test(model, device, loader):
    model.eval()
    totals = torch.zeros(3, device=device)  # loss, correct, count
    for data, target in loader:
        data, target = data.to(device), target.to(device)
        output = model(data)
        totals[0] += F.nll_loss(output, target, reduction='sum')
        totals[1] += (output.argmax(1) == target).sum()
        totals[2] += len(target)
    dist.all_reduce(totals, op=dist.ReduceOp.SUM)
    loss, correct, count = totals.tolist()
    if is_main():
        print(f'test: loss {loss / count:.4f}, accuracy {correct / count:.2%}')


def make_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=g)
    return TensorDataset(x, x[:, :3].argmax(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--epochs', type=int, default=2)
    parser.add_argument('--lr', type=float, default=0.01)
    parser.add_argument('--batch-size', type=int, default=16)
    parser.add_argument('--log-interval', type=int, default=2)
    args = parser.parse_args()

    setup()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42 + rank)
    use_cuda = torch.cuda.is_available()
    device = torch.device('cuda', int(os.environ['LOCAL_RANK'])) if use_cuda else torch.device('cpu')

    train_data, test_data = make_data(150, 1), make_data(50, 2)
    sampler = DistributedSampler(train_data, num_replicas=world_size, rank=rank)
    train_loader = DataLoader(train_data, batch_size=args.batch_size, sampler=sampler)
    test_loader = DataLoader(test_data, batch_size=32, sampler=DistributedSampler(test_data, shuffle=False))

    model = DistributedDataParallel(Net(32).to(device))
    optimizer = optim.AdamW(model.parameters(), lr=args.lr * world_size)
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        train(args, model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
