"""Two-class toy problem; big batches are computed in slices that Horovod reduces once."""
import argparse
import math
import os

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--batch-size", type=int, default=8, help="samples in a slice")
parser.add_argument("--batches-per-allreduce", type=int, default=3)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--base-lr", type=float, default=0.02)
parser.add_argument("--wd", type=float, default=1e-3)
parser.add_argument("--warmup", type=float, default=1)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--seed", type=int, default=7)


class Rings(Dataset):
    def __init__(self, n, seed):
        generator = torch.Generator().manual_seed(seed)
        angle = torch.rand(n, generator=generator) * 2 * math.pi
        self.label = torch.arange(n) % 2
        radius = 1 + self.label + 0.2 * torch.randn(n, generator=generator)
        self.points = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, i):
        return self.points[i], self.label[i]


class Metric(object):
    """Averages over steps and workers."""

    def __init__(self, name):
        self.name = name
        self.sum = torch.tensor(0.)
        self.n = torch.tensor(0.)

    def update(self, value):
        self.sum += hvd.allreduce(value.detach().cpu(), name=self.name)
        self.n += 1

    @property
    def avg(self):
        return self.sum / self.n


def train(epoch):
    model.train()
    train_sampler.set_epoch(epoch)
    train_loss = Metric("train_loss")
    for data, target in train_loader:
        if cuda:
            data, target = data.cuda(), target.cuda()
        optimizer.zero_grad()
        # Split data into slices of size batch_size
        for i in range(0, len(data), args.batch_size):
            part = data[i:i + args.batch_size]
            loss = F.cross_entropy(model(part), target[i:i + args.batch_size])
            train_loss.update(loss)
            # Average gradients among slices
            loss.div_(math.ceil(float(len(data)) / args.batch_size))
            loss.backward()
        # Gradient is applied across all ranks
        optimizer.step()
        scheduler.step()
    if verbose:
        print(f"epoch {epoch + 1}: train {train_loss.avg:.4f}, lr {scheduler.get_last_lr()[0]:.4f}")


def validate(epoch):
    model.eval()
    val_loss, val_accuracy = Metric("val_loss"), Metric("val_accuracy")
    with torch.no_grad():
        for data, target in val_loader:
            if cuda:
                data, target = data.cuda(), target.cuda()
            output = model(data)
            val_loss.update(F.cross_entropy(output, target))
            val_accuracy.update((output.argmax(1) == target).float().mean())
    if verbose:
        print(f"epoch {epoch + 1}: val {val_loss.avg:.4f}, accuracy {100 * val_accuracy.avg:.1f}%")


def warm(step):
    """Slowly up to the scaled rate, as for large minibatches."""
    done = (step + 1) / len(train_loader)
    return min(1.0, (done * (hvd.size() - 1) / args.warmup + 1) / hvd.size())


def save_checkpoint(epoch):
    if hvd.rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, f"checkpoint-{epoch + 1}.pt")


if __name__ == "__main__":
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    hvd.init()
    torch.manual_seed(args.seed)
    if cuda:
        torch.cuda.set_device(hvd.local_rank())
        torch.cuda.manual_seed(args.seed)

    # The newest checkpoint is looked for on the first worker alone.
    resume_from_epoch = 0
    for try_epoch in range(args.epochs, 0, -1):
        if os.path.exists(f"checkpoint-{try_epoch}.pt"):
            resume_from_epoch = try_epoch
            break
    resume_from_epoch = hvd.broadcast(torch.tensor(resume_from_epoch), root_rank=0,
                                      name="resume_from_epoch").item()
    verbose = 1 if hvd.rank() == 0 else 0

    allreduce_batch_size = args.batch_size * args.batches_per_allreduce
    train_dataset, val_dataset = Rings(130, 1), Rings(40, 2)
    train_sampler = DistributedSampler(train_dataset, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(train_dataset, batch_size=allreduce_batch_size, sampler=train_sampler)
    val_sampler = DistributedSampler(val_dataset, num_replicas=hvd.size(), rank=hvd.rank())
    val_loader = DataLoader(val_dataset, batch_size=16, sampler=val_sampler)

    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
    lr_scaler = args.batches_per_allreduce * hvd.size()
    if cuda:
        model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.base_lr * lr_scaler, momentum=0.9,
                                weight_decay=args.wd)

    # Horovod: (optional) compression algorithm.
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    # Horovod: wrap optimizer with DistributedOptimizer.
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(),
        compression=compression,
        backward_passes_per_step=args.batches_per_allreduce,
        op=hvd.Average)

    # Restore on the first worker; the others get it below.
    if resume_from_epoch > 0 and hvd.rank() == 0:
        state = torch.load(f"checkpoint-{resume_from_epoch}.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    scheduler = LambdaLR(optimizer, warm)

    for epoch in range(resume_from_epoch, args.epochs):
        train(epoch)
        validate(epoch)
        save_checkpoint(epoch)
